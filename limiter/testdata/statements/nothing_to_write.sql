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
  (WITH started AS MATERIALIZED (
    SELECT FROM "legion_agents" AS agent
    WHERE "agent"."metadata" @> $2::jsonb AND agent.agent_id <> $3
      AND agent.started_at > (SELECT now - (3600000000 * interval '1 microsecond') FROM clock) AND agent.started_at > now() - (3600000000 * interval '1 microsecond')
  ) SELECT count(*) FROM (SELECT FROM started LIMIT $4::bigint) AS counted)
FROM clock LEFT JOIN "legion_agents" AS own ON own.agent_id = $5;
-- $1 = '{"tenant":"acme"}'
-- $2 = '{"tenant":"acme"}'
-- $3 = 'agent'
-- $4 = 6
-- $5 = 'agent'

rollback;

