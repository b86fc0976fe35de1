/*NO LOAD BALANCE*/ SELECT agent.usage @> jsonb_build_array(jsonb_build_object('id', $1::text)) FROM "app"."Agents" AS agent WHERE agent.agent_id = $2
