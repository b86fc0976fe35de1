UPDATE "app"."Agents" AS agent SET status = 'idle', lease_expires_at = NULL, reserved_tokens = 0, updated_at = clock_timestamp()
WHERE agent.agent_id = $1 AND agent.run_id = $2 AND agent.status = 'running' AND agent.lease_expires_at IS NOT NULL
