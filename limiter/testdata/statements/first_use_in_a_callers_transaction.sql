begin;

SAVEPOINT legion;

SELECT current_setting('transaction_isolation'), pg_advisory_xact_lock_shared($1::bigint), pg_advisory_xact_lock($2::bigint), pg_advisory_xact_lock_shared($3::bigint);
-- $1 = -4729635920929221338
-- $2 = 5814946601062505044
-- $3 = 6587197712992691044

SELECT identity FROM "legion_agents_identities" WHERE "identity" IN ($1::jsonb,$2::jsonb,$3::jsonb) ORDER BY identity FOR UPDATE;
-- $1 = '{"email":"someone@example.com"}'
-- $2 = '{"tenant":"acme"}'
-- $3 = '{"email":"someone@example.com","tenant":"acme"}'

WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT clock.now,
  own.started_at,
  coalesce(own.metadata = $1::jsonb AND own.deleted_at IS NULL, false),
  coalesce(own.status = 'running' AND own.run_id IS NOT NULL AND own.lease_expires_at > clock.now, false), own.run_id, coalesce(own.status = 'running', false), own.deleted_at IS NOT NULL
FROM clock LEFT JOIN "legion_agents" AS own ON own.agent_id = $2;
-- $1 = '{"email":"someone@example.com","tenant":"acme"}'
-- $2 = 'agent'

ROLLBACK TO SAVEPOINT legion;

SELECT current_setting('transaction_isolation'), pg_advisory_xact_lock_shared($1::bigint), pg_advisory_xact_lock($2::bigint), pg_advisory_xact_lock_shared($3::bigint);
-- $1 = -4729635920929221338
-- $2 = 5814946601062505044
-- $3 = 6587197712992691044

SELECT CASE WHEN pg_try_advisory_xact_lock($1::bigint) THEN true WHEN pg_try_advisory_xact_lock($2::bigint) THEN true ELSE false END;
-- $1 = 6587197712992691044
-- $2 = -4729635920929221338

INSERT INTO "legion_agents_identities" (identity) VALUES ($1::jsonb) ON CONFLICT (identity) DO NOTHING;
-- $1 = '{"email":"someone@example.com","tenant":"acme"}'

SELECT identity FROM "legion_agents_identities" WHERE "identity" IN ($1::jsonb,$2::jsonb,$3::jsonb) ORDER BY identity FOR UPDATE;
-- $1 = '{"email":"someone@example.com"}'
-- $2 = '{"tenant":"acme"}'
-- $3 = '{"email":"someone@example.com","tenant":"acme"}'

WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT clock.now,
  own.started_at,
  coalesce(own.metadata = $1::jsonb AND own.deleted_at IS NULL, false),
  coalesce(own.status = 'running' AND own.run_id IS NOT NULL AND own.lease_expires_at > clock.now, false), own.run_id, coalesce(own.status = 'running', false), own.deleted_at IS NOT NULL
FROM clock LEFT JOIN "legion_agents" AS own ON own.agent_id = $2;
-- $1 = '{"email":"someone@example.com","tenant":"acme"}'
-- $2 = 'agent'

INSERT INTO "legion_agents" AS agent
  (agent_id, metadata, started_at, created_at, updated_at, status, lease_expires_at)
VALUES ($1, $2::jsonb, clock_timestamp(), clock_timestamp(), clock_timestamp(), 'idle', NULL)
ON CONFLICT (agent_id) DO UPDATE SET
  metadata = excluded.metadata, started_at = coalesce(agent.started_at, excluded.started_at), deleted_at = NULL, updated_at = clock_timestamp();
-- $1 = 'agent'
-- $2 = '{"email":"someone@example.com","tenant":"acme"}'

RELEASE SAVEPOINT legion;

commit;

