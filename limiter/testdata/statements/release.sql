begin isolation level read committed;

SELECT coalesce(agent.status = 'running' AND agent.run_id IS NOT NULL AND agent.lease_expires_at > clock_timestamp(), false)
FROM "legion_agents" AS agent WHERE agent.agent_id = $1 FOR NO KEY UPDATE;
-- $1 = 'agent'

UPDATE "legion_agents" SET status = 'idle', lease_expires_at = NULL, updated_at = clock_timestamp() WHERE agent_id = $1 AND status = 'running' AND run_id IS NULL;
-- $1 = 'agent'

commit;

