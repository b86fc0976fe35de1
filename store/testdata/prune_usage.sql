UPDATE "app"."Agents" AS agent
SET usage = (SELECT coalesce(jsonb_agg(entry.element ORDER BY entry.position), '[]') FROM jsonb_array_elements(CASE jsonb_typeof(agent.usage) WHEN 'array' THEN agent.usage ELSE '[]' END) WITH ORDINALITY AS entry (element, position) WHERE NOT coalesce((CASE jsonb_typeof(entry.element -> 'at') WHEN 'number' THEN (entry.element ->> 'at')::numeric END) < $1::bigint, false))
FROM jsonb_array_elements_text($2::jsonb) AS locked (key)
WHERE agent.agent_id = locked.key
