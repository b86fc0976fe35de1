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
  (SELECT json_build_array(0, least(9223372036854775807, ceil(coalesce(sum(CASE jsonb_typeof(entry.evals) WHEN 'number' THEN least(9223372036854775807, greatest(0, (entry.evals)::numeric)) ELSE 0 END), 0)))::bigint)::text
    FROM "legion_agents" AS agent CROSS JOIN LATERAL (SELECT agent.usage #> '{}' AS document OFFSET 0) AS unpacked
    CROSS JOIN LATERAL (
      SELECT element.value -> 'at' AS at, element.value -> 'total_tokens' AS total_tokens, element.value -> 'evals' AS evals
      FROM jsonb_array_elements(CASE jsonb_typeof(unpacked.document) WHEN 'array' THEN unpacked.document ELSE '[]' END) AS element (value)
      OFFSET 0) AS entry
    WHERE ("agent"."metadata" @> $2::jsonb OR agent.agent_id = $3) AND agent.updated_at > now() - (3900000000 * interval '1 microsecond')
      AND CASE jsonb_typeof(entry.at) WHEN 'number' THEN (entry.at)::numeric > (SELECT extract(epoch FROM now - (3600000000 * interval '1 microsecond')) * 1000 FROM clock) ELSE random() < 0 END)
FROM clock LEFT JOIN "legion_agents" AS own ON own.agent_id = $4;
-- $1 = '{"tenant":"acme"}'
-- $2 = '{"tenant":"acme"}'
-- $3 = 'agent'
-- $4 = 'agent'

rollback;

WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT forecast.rule, (extract(epoch FROM clock.now) * 1000000)::bigint, forecast.used, forecast.resets_at, forecast.blocked_to
FROM clock CROSS JOIN (
SELECT $1::int AS rule, $2::int AS quota, forecast.* FROM (SELECT least(9223372036854775807, ceil(coalesce(sum(amount), 0)))::bigint AS used, (max(least(9223372036854775807, expires)) FILTER (WHERE amount > 0))::bigint AS resets_at, (max(least(9223372036854775807, expires)) FILTER (WHERE held >= $3::numeric))::bigint AS blocked_to
  FROM (
    SELECT amount, expires, ceil(sum(CASE WHEN own THEN 0 ELSE amount END) OVER (ORDER BY expires DESC)) AS held FROM (SELECT CASE jsonb_typeof(entry.evals) WHEN 'number' THEN least(9223372036854775807, greatest(0, (entry.evals)::numeric)) ELSE 0 END AS amount,
    least(9223372036854775807, entry.at::numeric) * 1000 + $4::bigint AS expires, false AS own
  FROM "legion_agents" AS agent CROSS JOIN LATERAL (SELECT agent.usage #> '{}' AS document OFFSET 0) AS unpacked
    CROSS JOIN LATERAL (
      SELECT element.value -> 'at' AS at, element.value -> 'total_tokens' AS total_tokens, element.value -> 'evals' AS evals
      FROM jsonb_array_elements(CASE jsonb_typeof(unpacked.document) WHEN 'array' THEN unpacked.document ELSE '[]' END) AS element (value)
      OFFSET 0) AS entry
    WHERE ("agent"."metadata" @> $5::jsonb OR agent.agent_id = $6) AND agent.updated_at > now() - (3900000000 * interval '1 microsecond')
      AND CASE jsonb_typeof(entry.at) WHEN 'number' THEN (entry.at)::numeric > (SELECT extract(epoch FROM now - (3600000000 * interval '1 microsecond')) * 1000 FROM clock) ELSE random() < 0 END) AS item
  ) AS held) AS forecast
) AS forecast
ORDER BY forecast.quota;
-- $1 = 0
-- $2 = 0
-- $3 = 0
-- $4 = 3600000000
-- $5 = '{"tenant":"acme"}'
-- $6 = 'agent'

