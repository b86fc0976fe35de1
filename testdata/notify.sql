CREATE FUNCTION "audit"."My ""agents""_notify"() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $legion$
-- Made by legion.WithNotify, version 1
DECLARE
  channel text := pg_catalog.concat('legion_', pg_catalog.left(pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(pg_catalog.json_build_array(TG_TABLE_SCHEMA, TG_TABLE_NAME)::text, 'UTF8')), 'hex'), 40));
BEGIN
  IF TG_OP <> 'INSERT' THEN
    PERFORM pg_notify(channel, OLD.agent_id);
  END IF;
  IF TG_OP <> 'DELETE' THEN
    PERFORM pg_notify(channel, NEW.agent_id);
  END IF;
  RETURN NULL;
END
$legion$;

CREATE OR REPLACE TRIGGER legion_notify AFTER INSERT OR DELETE ON "audit"."My ""agents"""
FOR EACH ROW EXECUTE FUNCTION "audit"."My ""agents""_notify"();

CREATE OR REPLACE TRIGGER legion_notify_update AFTER UPDATE ON "audit"."My ""agents""" FOR EACH ROW WHEN (
  (OLD.updated_at, OLD.status, OLD.run_id, OLD.reserved_tokens, OLD.deleted_at, OLD.lease_expires_at IS NULL) IS DISTINCT FROM
  (NEW.updated_at, NEW.status, NEW.run_id, NEW.reserved_tokens, NEW.deleted_at, NEW.lease_expires_at IS NULL)
  OR (OLD.lease_expires_at IS NOT DISTINCT FROM NEW.lease_expires_at AND OLD.* OPERATOR(pg_catalog.*<>) NEW.*)
) EXECUTE FUNCTION "audit"."My ""agents""_notify"();
