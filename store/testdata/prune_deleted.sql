SELECT agent.agent_id, 0 FROM "app"."Agents" AS agent
WHERE "agent_id" > $1::text AND "agent_id" <= $2::text AND agent.deleted_at < $3::timestamptz AND agent.updated_at < $4::timestamptz
  AND (agent.started_at IS NULL OR agent.started_at < $5::timestamptz)
  AND (agent.lease_expires_at IS NULL OR agent.lease_expires_at <= clock_timestamp())
ORDER BY agent.agent_id FOR UPDATE SKIP LOCKED
