begin isolation level read committed;

SELECT agents IS NOT NULL, identities IS NOT NULL,
  coalesce(row_security_active(agents), false) OR coalesce(row_security_active(identities), false)
FROM (SELECT to_regclass($1)::oid AS agents, to_regclass($2)::oid AS identities) AS tables;
-- $1 = '"legion_agents"'
-- $2 = '"legion_agents_identities"'

commit;

begin isolation level read committed;

SELECT pg_advisory_xact_lock($1::bigint);
-- $1 = 6689056904817310542

SELECT agents IS NOT NULL, identities IS NOT NULL,
  coalesce(row_security_active(agents), false) OR coalesce(row_security_active(identities), false)
FROM (SELECT to_regclass($1)::oid AS agents, to_regclass($2)::oid AS identities) AS tables;
-- $1 = '"legion_agents"'
-- $2 = '"legion_agents_identities"'

CREATE TABLE "legion_agents_identities" ("identity" JSONB,"created_at" timestamptz NOT NULL DEFAULT now(),PRIMARY KEY ("identity"));

commit;

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

rollback;

begin isolation level read committed;

SELECT CASE WHEN pg_try_advisory_xact_lock($1::bigint) THEN true ELSE false END;
-- $1 = -4729635920929221338

INSERT INTO "legion_agents_identities" (identity) VALUES ($1::jsonb) ON CONFLICT (identity) DO NOTHING;
-- $1 = '{"tenant":"acme"}'

commit;

begin isolation level read committed;

SELECT agents IS NOT NULL, identities IS NOT NULL,
  coalesce(row_security_active(agents), false) OR coalesce(row_security_active(identities), false)
FROM (SELECT to_regclass($1)::oid AS agents, to_regclass($2)::oid AS identities) AS tables;
-- $1 = '"legion_agents"'
-- $2 = '"legion_agents_identities"'

commit;

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

INSERT INTO "legion_agents" AS agent
  (agent_id, metadata, started_at, created_at, updated_at, status, lease_expires_at)
VALUES ($1, $2::jsonb, clock_timestamp(), clock_timestamp(), clock_timestamp(), 'idle', NULL)
ON CONFLICT (agent_id) DO UPDATE SET
  metadata = excluded.metadata, started_at = coalesce(agent.started_at, excluded.started_at), deleted_at = NULL, updated_at = clock_timestamp();
-- $1 = 'agent'
-- $2 = '{"tenant":"acme"}'

commit;

