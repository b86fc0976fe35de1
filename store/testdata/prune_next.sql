SELECT "identity"::text FROM (SELECT "identity" FROM "app"."Agents_identities" WHERE "identity" > $1::jsonb ORDER BY "identity" LIMIT $2) AS batch ORDER BY "identity" DESC LIMIT 1
