INSERT INTO "app"."Agents" AS agent (agent_id, created_at, updated_at)
VALUES ($1, clock_timestamp(), clock_timestamp())
ON CONFLICT (agent_id) DO NOTHING
