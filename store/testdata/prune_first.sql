SELECT "agent_id"::text FROM (SELECT "agent_id" FROM "app"."Agents" WHERE true ORDER BY "agent_id" LIMIT $1) AS batch ORDER BY "agent_id" DESC LIMIT 1
