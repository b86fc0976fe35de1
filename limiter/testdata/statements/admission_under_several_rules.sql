begin isolation level read committed;

SELECT current_setting('transaction_isolation'), pg_advisory_xact_lock_shared($1::bigint), pg_advisory_xact_lock($2::bigint), pg_advisory_xact_lock_shared($3::bigint);
-- $1 = -4729635920929221338
-- $2 = 5814946601062505044
-- $3 = 6587197712992691044

SELECT identity FROM "legion_agents_identities" WHERE "identity" IN ($1::jsonb,$2::jsonb,$3::jsonb,$4::jsonb) ORDER BY identity FOR UPDATE;
-- $1 = '{"email":"someone@example.com"}'
-- $2 = '{"tenant":"acme"}'
-- $3 = '{"email":"someone@example.com","tenant":"acme"}'
-- $4 = '{}'

WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT clock.now,
  own.started_at,
  coalesce(own.metadata = $1::jsonb AND own.deleted_at IS NULL, false),
  coalesce(own.status = 'running' AND own.run_id IS NOT NULL AND own.lease_expires_at > clock.now, false), own.run_id, coalesce(own.status = 'running', false), own.deleted_at IS NOT NULL,
  (WITH started AS MATERIALIZED (
    SELECT FROM "legion_agents" AS agent
    WHERE "agent"."metadata" @> $2::jsonb AND agent.agent_id <> $3
      AND agent.started_at > (SELECT now - (3600000000 * interval '1 microsecond') FROM clock) AND agent.started_at > now() - (3600000000 * interval '1 microsecond')
  ) SELECT count(*) FROM (SELECT FROM started LIMIT $4::bigint) AS counted),
  (SELECT json_build_array(count(*), count(*) FILTER (WHERE agent.lease_expires_at <= (SELECT now FROM clock)), least(9223372036854775807, ceil(coalesce(sum(greatest(0, agent.reserved_tokens)), 0)))::bigint, least(9223372036854775807, ceil(coalesce(sum(greatest(0, agent.reserved_tokens)) FILTER (WHERE agent.lease_expires_at <= (SELECT now FROM clock)), 0)))::bigint)::text
    FROM "legion_agents" AS agent
    WHERE "agent"."metadata" @> $5::jsonb AND agent.agent_id <> $6 AND agent.status = 'running' AND agent.lease_expires_at IS NOT NULL AND (agent.run_id IS NOT NULL OR agent.lease_expires_at > (SELECT now FROM clock))),
  (WITH started AS MATERIALIZED (
    SELECT FROM "legion_agents" AS agent
    WHERE agent.metadata IS NOT NULL AND agent.agent_id <> $7
      AND agent.started_at > (SELECT now - (86400000000 * interval '1 microsecond') FROM clock) AND agent.started_at > now() - (86400000000 * interval '1 microsecond')
  ) SELECT count(*) FROM (SELECT FROM started LIMIT $8::bigint) AS counted),
  (SELECT json_build_array(count(*), count(*) FILTER (WHERE agent.lease_expires_at <= (SELECT now FROM clock)), least(9223372036854775807, ceil(coalesce(sum(greatest(0, agent.reserved_tokens)), 0)))::bigint, least(9223372036854775807, ceil(coalesce(sum(greatest(0, agent.reserved_tokens)) FILTER (WHERE agent.lease_expires_at <= (SELECT now FROM clock)), 0)))::bigint)::text
    FROM "legion_agents" AS agent
    WHERE agent.metadata IS NOT NULL AND agent.agent_id <> $9 AND agent.status = 'running' AND agent.lease_expires_at IS NOT NULL AND (agent.run_id IS NOT NULL OR agent.lease_expires_at > (SELECT now FROM clock))),
  (SELECT json_build_array(least(9223372036854775807, ceil(coalesce(sum(CASE jsonb_typeof(entry.total_tokens) WHEN 'number' THEN least(9223372036854775807, greatest(0, (entry.total_tokens)::numeric)) ELSE 0 END), 0)))::bigint, 0)::text
    FROM "legion_agents" AS agent CROSS JOIN LATERAL (SELECT agent.usage #> '{}' AS document OFFSET 0) AS unpacked
    CROSS JOIN LATERAL (
      SELECT element.value -> 'at' AS at, element.value -> 'total_tokens' AS total_tokens, element.value -> 'evals' AS evals
      FROM jsonb_array_elements(CASE jsonb_typeof(unpacked.document) WHEN 'array' THEN unpacked.document ELSE '[]' END) AS element (value)
      OFFSET 0) AS entry
    WHERE (agent.metadata IS NOT NULL OR agent.agent_id = $10) AND agent.updated_at > now() - (86700000000 * interval '1 microsecond')
      AND CASE jsonb_typeof(entry.at) WHEN 'number' THEN (entry.at)::numeric > (SELECT extract(epoch FROM now - (86400000000 * interval '1 microsecond')) * 1000 FROM clock) ELSE random() < 0 END)
FROM clock LEFT JOIN "legion_agents" AS own ON own.agent_id = $11;
-- $1 = '{"email":"someone@example.com","tenant":"acme"}'
-- $2 = '{"tenant":"acme"}'
-- $3 = 'agent'
-- $4 = 6
-- $5 = '{"email":"someone@example.com","tenant":"acme"}'
-- $6 = 'agent'
-- $7 = 'agent'
-- $8 = 101
-- $9 = 'agent'
-- $10 = 'agent'
-- $11 = 'agent'

INSERT INTO "legion_agents" AS agent
  (agent_id, metadata, started_at, created_at, updated_at, status, lease_expires_at)
VALUES ($1, $2::jsonb, clock_timestamp(), clock_timestamp(), clock_timestamp(), 'running', clock_timestamp() + (30000000 * interval '1 microsecond'))
ON CONFLICT (agent_id) DO UPDATE SET
  metadata = excluded.metadata, started_at = coalesce(agent.started_at, excluded.started_at), deleted_at = NULL, updated_at = clock_timestamp(), status = 'running', (run_id, reserved_tokens, lease_expires_at) = (
    SELECT CASE WHEN live THEN agent.run_id END,
      CASE WHEN live THEN agent.reserved_tokens ELSE 0 END,
      CASE WHEN live THEN agent.lease_expires_at ELSE clock_timestamp() + (30000000 * interval '1 microsecond') END
    FROM (SELECT coalesce(agent.status = 'running' AND agent.run_id IS NOT NULL AND agent.lease_expires_at > clock_timestamp(), false) AS live) AS own);
-- $1 = 'agent'
-- $2 = '{"email":"someone@example.com","tenant":"acme"}'

commit;

