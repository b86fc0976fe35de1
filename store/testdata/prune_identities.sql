DELETE FROM "app"."Agents_identities" AS registered USING jsonb_array_elements_text($1::jsonb) AS locked (key)
WHERE registered.identity = locked.key::jsonb
  AND NOT EXISTS (SELECT FROM "app"."Agents" AS agent WHERE agent.metadata @> registered.identity)
