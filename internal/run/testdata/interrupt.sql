UPDATE "app"."Agents" AS agent SET lease_expires_at = NULL WHERE agent.agent_id = $1 AND agent.run_id = $2 AND agent.status = 'running' AND agent.lease_expires_at IS NOT NULL
