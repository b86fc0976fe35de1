WITH asked AS (
  SELECT agent_id, run_id FROM unnest($1::text[], $2::text[]) AS asked (agent_id, run_id)
), locked AS MATERIALIZED (
  SELECT agent.agent_id, agent.run_id FROM "app"."Agents" AS agent
  WHERE agent.agent_id = ANY ($1::text[]) AND agent.status = 'running'
    AND (agent.agent_id, agent.run_id) IN (SELECT agent_id, run_id FROM asked)
    AND agent.lease_expires_at > clock_timestamp()
  ORDER BY agent.agent_id FOR NO KEY UPDATE SKIP LOCKED
), renewed AS (
  UPDATE "app"."Agents" AS agent SET lease_expires_at = clock_timestamp() + 30000000 * interval '1 microsecond'
  FROM locked
  WHERE agent.agent_id = locked.agent_id AND agent.run_id = locked.run_id
    AND agent.status = 'running' AND agent.lease_expires_at > clock_timestamp()
  RETURNING agent.agent_id, agent.run_id
)
SELECT asked.agent_id, asked.run_id, renewed.run_id IS NOT NULL,
  coalesce(agent.run_id = asked.run_id AND agent.status = 'running' AND agent.lease_expires_at > clock_timestamp(), false)
FROM asked
LEFT JOIN renewed ON renewed.agent_id = asked.agent_id AND renewed.run_id = asked.run_id
LEFT JOIN "app"."Agents" AS agent ON agent.agent_id = asked.agent_id
