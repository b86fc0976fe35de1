SELECT * FROM "legion_agents" WHERE agent_id = $1 LIMIT $2;
-- $1 = 'agent'
-- $2 = 1

begin isolation level read committed;

SELECT current_setting('transaction_isolation'), pg_advisory_xact_lock_shared($1::bigint), pg_advisory_xact_lock($2::bigint);
-- $1 = -4729635920929221338
-- $2 = 5814946601062505044

SELECT identity FROM "legion_agents_identities" WHERE "identity" = $1::jsonb ORDER BY identity FOR UPDATE;
-- $1 = '{"tenant":"acme"}'

WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT clock.now,
  own.started_at,
  coalesce(own.metadata = $1::jsonb AND own.deleted_at IS NULL, false),
  coalesce(own.status = 'running' AND own.run_id IS NOT NULL AND own.lease_expires_at > clock.now, false), own.run_id, coalesce(own.status = 'running', false), own.deleted_at IS NOT NULL,
  (SELECT json_build_array(count(*), count(*) FILTER (WHERE agent.lease_expires_at <= (SELECT now FROM clock)), least(9223372036854775807, ceil(coalesce(sum(greatest(0, agent.reserved_tokens)), 0)))::bigint, least(9223372036854775807, ceil(coalesce(sum(greatest(0, agent.reserved_tokens)) FILTER (WHERE agent.lease_expires_at <= (SELECT now FROM clock)), 0)))::bigint)::text
    FROM "legion_agents" AS agent
    WHERE "agent"."metadata" @> $2::jsonb AND agent.agent_id <> $3 AND agent.status = 'running' AND agent.lease_expires_at IS NOT NULL AND (agent.run_id IS NOT NULL OR agent.lease_expires_at > (SELECT now FROM clock))),
  (SELECT json_build_array(least(9223372036854775807, ceil(coalesce(sum(CASE jsonb_typeof(entry.total_tokens) WHEN 'number' THEN least(9223372036854775807, greatest(0, (entry.total_tokens)::numeric)) ELSE 0 END), 0)))::bigint, 0)::text
    FROM "legion_agents" AS agent CROSS JOIN LATERAL (SELECT agent.usage #> '{}' AS document OFFSET 0) AS unpacked
    CROSS JOIN LATERAL (
      SELECT element.value -> 'at' AS at, element.value -> 'total_tokens' AS total_tokens, element.value -> 'evals' AS evals
      FROM jsonb_array_elements(CASE jsonb_typeof(unpacked.document) WHEN 'array' THEN unpacked.document ELSE '[]' END) AS element (value)
      OFFSET 0) AS entry
    WHERE ("agent"."metadata" @> $4::jsonb OR agent.agent_id = $5) AND agent.updated_at > now() - (360000000 * interval '1 microsecond')
      AND CASE jsonb_typeof(entry.at) WHEN 'number' THEN (entry.at)::numeric > (SELECT extract(epoch FROM now - (60000000 * interval '1 microsecond')) * 1000 FROM clock) ELSE random() < 0 END)
FROM clock LEFT JOIN "legion_agents" AS own ON own.agent_id = $6;
-- $1 = '{"tenant":"acme"}'
-- $2 = '{"tenant":"acme"}'
-- $3 = 'agent'
-- $4 = '{"tenant":"acme"}'
-- $5 = 'agent'
-- $6 = 'agent'

UPDATE "legion_agents" AS agent SET updated_at = clock_timestamp(), run_id = $1, reserved_tokens = $2, lease_expires_at = clock_timestamp() + (30000000 * interval '1 microsecond'), metadata = $3::jsonb, started_at = coalesce(agent.started_at, clock_timestamp())
WHERE (agent.agent_id = $4 AND agent.run_id = $5 AND agent.status = 'running' AND agent.deleted_at IS NULL
  AND (agent.lease_expires_at IS NULL OR agent.lease_expires_at <= clock_timestamp())) OR (agent.agent_id = $6 AND agent.run_id = $7 AND agent.status = 'running' AND agent.deleted_at IS NULL
  AND (agent.lease_expires_at IS NULL OR agent.lease_expires_at <= clock_timestamp()));
-- $1 = 'next'
-- $2 = 7
-- $3 = '{"tenant":"acme"}'
-- $4 = 'agent'
-- $5 = 'run of agent'
-- $6 = 'agent'
-- $7 = 'next'

commit;

