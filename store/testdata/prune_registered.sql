SELECT registered.identity::text, 0 FROM "app"."Agents_identities" AS registered
WHERE true AND "identity" <= $1::jsonb
ORDER BY registered.identity FOR UPDATE SKIP LOCKED
