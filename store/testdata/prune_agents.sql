DELETE FROM "app"."Agents" AS agent USING jsonb_array_elements_text($1::jsonb) AS locked (key)
WHERE agent.agent_id = locked.key
