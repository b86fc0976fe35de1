/*NO LOAD BALANCE*/ SELECT deleted_at IS NOT NULL FROM "app"."Agents" WHERE agent_id = $1
