UPDATE "app"."Agents" AS agent SET status = 'idle', lease_expires_at = NULL, reserved_tokens = 0, updated_at = clock_timestamp(), conversation_state = $1
WHERE agent.agent_id = $2 AND agent.run_id = $3 AND agent.status = 'running' AND agent.lease_expires_at IS NOT NULL
