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
  (WITH started AS MATERIALIZED (
    SELECT FROM "legion_agents" AS agent
    WHERE "agent"."metadata" @> $2::jsonb AND agent.agent_id <> $3
      AND agent.started_at > (SELECT now - (3600000000 * interval '1 microsecond') FROM clock) AND agent.started_at > now() - (3600000000 * interval '1 microsecond')
  ) SELECT count(*) FROM (SELECT FROM started LIMIT $4::bigint) AS counted)
FROM clock LEFT JOIN "legion_agents" AS own ON own.agent_id = $5;
-- $1 = '{"tenant":"acme"}'
-- $2 = '{"tenant":"acme"}'
-- $3 = 'agent'
-- $4 = 1
-- $5 = 'agent'

WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT forecast.rule, (extract(epoch FROM clock.now) * 1000000)::bigint, forecast.used, forecast.resets_at, forecast.blocked_to
FROM clock CROSS JOIN (
SELECT $1::int AS rule, $2::int AS quota, forecast.* FROM (SELECT 0 AS used, NULL::bigint AS resets_at, (
    WITH started AS MATERIALIZED (SELECT agent.started_at FROM "legion_agents" AS agent
  WHERE ("agent"."metadata" @> $3::jsonb OR agent.agent_id = $4) AND agent.started_at > (SELECT now - (3600000000 * interval '1 microsecond') FROM clock) AND agent.started_at > now() - (3600000000 * interval '1 microsecond') ORDER BY agent.started_at DESC)
    SELECT least(9223372036854775807, extract(epoch FROM started_at + (3600000000 * interval '1 microsecond')) * 1000000)::bigint FROM started OFFSET greatest(0, ($5::numeric + (SELECT count(started_at) FROM "legion_agents" WHERE agent_id = $6)) - 1)::bigint LIMIT 1
  ) AS blocked_to) AS forecast
) AS forecast
ORDER BY forecast.quota;
-- $1 = 0
-- $2 = 0
-- $3 = '{"tenant":"acme"}'
-- $4 = 'agent'
-- $5 = 0
-- $6 = 'agent'

ROLLBACK TO SAVEPOINT legion;

RELEASE SAVEPOINT legion;

commit;

