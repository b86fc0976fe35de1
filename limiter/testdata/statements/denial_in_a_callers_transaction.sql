begin;

SAVEPOINT legion;

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
  measured.agents,
  measured.running, measured.expired_running, measured.reserved, measured.expired_reserved,
  measured.tokens, measured.evals
FROM clock
LEFT JOIN "legion_agents" AS own ON own.agent_id = $2
CROSS JOIN (
SELECT $3::int AS rule, (WITH started AS MATERIALIZED (
  SELECT FROM "legion_agents" AS agent
  WHERE "agent"."metadata" @> $4::jsonb AND agent.agent_id <> $5
    AND agent.started_at > (SELECT now - (3600000000 * interval '1 microsecond') FROM clock) AND agent.started_at > now() - (3600000000 * interval '1 microsecond')
) SELECT count(*) FROM (SELECT FROM started LIMIT $6::bigint) AS counted) AS agents, slots.*, used.* FROM (SELECT 0::bigint AS running, 0::bigint AS expired_running, 0::bigint AS reserved, 0::bigint AS expired_reserved) AS slots CROSS JOIN (SELECT 0::bigint AS tokens, 0::bigint AS evals) AS used
) AS measured
ORDER BY measured.rule;
-- $1 = '{"tenant":"acme"}'
-- $2 = 'agent'
-- $3 = 0
-- $4 = '{"tenant":"acme"}'
-- $5 = 'agent'
-- $6 = 1

WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT forecast.rule, (extract(epoch FROM clock.now) * 1000000)::bigint, forecast.used, forecast.resets_at, forecast.blocked_to
FROM clock CROSS JOIN (
SELECT $1::int AS rule, $2::int AS quota,
  least(9223372036854775807, ceil(coalesce(sum(amount), 0)))::bigint AS used, max(least(9223372036854775807, expires)) FILTER (WHERE amount > 0)::bigint AS resets_at, max(least(9223372036854775807, expires)) FILTER (WHERE held >= $3::numeric + (SELECT count(started_at) FROM "legion_agents" WHERE agent_id = $4))::bigint AS blocked_to
FROM (
  SELECT amount, expires, ceil(sum(CASE WHEN own THEN 0 ELSE amount END) OVER (ORDER BY expires DESC)) AS held FROM (SELECT 1::numeric AS amount, extract(epoch FROM agent.started_at + (3600000000 * interval '1 microsecond')) * 1000000 AS expires, false AS own
  FROM "legion_agents" AS agent
  WHERE ("agent"."metadata" @> $5::jsonb OR agent.agent_id = $6) AND agent.started_at > (SELECT now - (3600000000 * interval '1 microsecond') FROM clock) AND agent.started_at > now() - (3600000000 * interval '1 microsecond')) AS item
) AS held
) AS forecast
ORDER BY forecast.quota;
-- $1 = 0
-- $2 = 0
-- $3 = 0
-- $4 = 'agent'
-- $5 = '{"tenant":"acme"}'
-- $6 = 'agent'

ROLLBACK TO SAVEPOINT legion;

RELEASE SAVEPOINT legion;

commit;

