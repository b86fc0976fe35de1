UPDATE "app"."Agents" SET deleted_at = clock_timestamp(), updated_at = clock_timestamp()
WHERE agent_id = $1 AND deleted_at IS NULL
