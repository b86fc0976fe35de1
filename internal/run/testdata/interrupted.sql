/*NO LOAD BALANCE*/ SELECT agent.agent_id, agent.run_id, greatest(0, agent.reserved_tokens)
FROM "app"."Agents" AS agent
WHERE agent.agent_id > $1 AND agent.status = 'running' AND agent.run_id IS NOT NULL
  AND (agent.lease_expires_at IS NULL OR agent.lease_expires_at <= clock_timestamp())
  AND coalesce(agent.parent_agent_id, '') = '' AND agent.deleted_at IS NULL
ORDER BY agent.agent_id LIMIT $2::bigint
