INSERT INTO "app"."Agents" AS agent (agent_id, created_at, updated_at)
VALUES ($1, clock_timestamp(), clock_timestamp())
ON CONFLICT (agent_id) DO UPDATE SET status = 'idle', lease_expires_at = NULL, reserved_tokens = 0, run_id = CASE agent.status WHEN 'running' THEN NULL ELSE agent.run_id END, updated_at = clock_timestamp()
WHERE NOT coalesce(agent.status = 'running' AND agent.run_id IS NOT NULL AND agent.lease_expires_at > clock_timestamp(), false)
