begin isolation level read committed;

SELECT metadata FROM "legion_agents" WHERE agent_id = $1;
-- $1 = 'agent'

SELECT current_setting('transaction_isolation'), pg_advisory_xact_lock_shared($1::bigint), pg_advisory_xact_lock($2::bigint);
-- $1 = -4729635920929221338
-- $2 = 5814946601062505044

SELECT identity FROM "legion_agents_identities" WHERE "identity" = $1::jsonb ORDER BY identity FOR UPDATE;
-- $1 = '{"tenant":"acme"}'

WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT clock.now,
  own.started_at,
  coalesce(own.metadata = $1::jsonb, false),
  coalesce(own.status = 'running' AND own.run_id IS NOT NULL AND own.lease_expires_at > clock.now, false), own.run_id, coalesce(own.status = 'running', false), own.deleted_at IS NOT NULL
FROM clock LEFT JOIN "legion_agents" AS own ON own.agent_id = $2;
-- $1 = '{"tenant":"acme"}'
-- $2 = 'agent'

INSERT INTO "legion_agents" AS agent (agent_id, created_at, updated_at, status, run_id, reserved_tokens, lease_expires_at)
VALUES ($1, clock_timestamp(), clock_timestamp(), 'running', $2, $3, clock_timestamp() + (30000000 * interval '1 microsecond'))
ON CONFLICT (agent_id) DO UPDATE SET deleted_at = NULL, updated_at = clock_timestamp(), status = 'running', run_id = excluded.run_id, reserved_tokens = excluded.reserved_tokens, lease_expires_at = clock_timestamp() + (30000000 * interval '1 microsecond')
WHERE NOT coalesce(agent.status = 'running' AND agent.run_id IS NOT NULL AND agent.lease_expires_at > clock_timestamp(), false);
-- $1 = 'agent'
-- $2 = 'run'
-- $3 = 0

commit;

