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
  coalesce(own.status = 'running' AND own.run_id IS NOT NULL AND own.lease_expires_at > clock.now, false), own.run_id, coalesce(own.status = 'running', false), own.deleted_at IS NOT NULL
FROM clock LEFT JOIN "legion_agents" AS own ON own.agent_id = $2;
-- $1 = '{"tenant":"acme"}'
-- $2 = 'agent'

UPDATE "legion_agents" AS agent SET lease_expires_at = clock_timestamp() + (30000000 * interval '1 microsecond') WHERE agent.agent_id = $1 AND agent.run_id = $2 AND agent.status = 'running' AND agent.lease_expires_at IS NOT NULL;
-- $1 = 'agent'
-- $2 = 'run'

commit;

