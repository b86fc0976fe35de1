INSERT INTO "app"."Agents" AS agent (agent_id, agent_type, parent_agent_id, conversation_state, created_at, updated_at)
VALUES ($1, $2, $3, $4, clock_timestamp(), clock_timestamp())
ON CONFLICT (agent_id) DO UPDATE SET agent_type = excluded.agent_type, parent_agent_id = excluded.parent_agent_id, conversation_state = excluded.conversation_state, updated_at = clock_timestamp()
