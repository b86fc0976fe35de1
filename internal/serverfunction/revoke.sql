CREATE OR REPLACE FUNCTION {{revoke}}(p_agent text, p_rules jsonb, p_groups jsonb)
RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $legion$
-- {{marker}}
-- Takes the expired slots that matter, as revoke.go says, and returns whether there was
-- one.
DECLARE
  v_identity jsonb;
  v_found text[];
  v_matching text[] := '{}';
BEGIN
  FOR v_identity IN
    SELECT rule.value -> 'identity'
    FROM jsonb_array_elements(p_rules) WITH ORDINALITY AS rule (value, position)
    JOIN jsonb_array_elements(p_groups) WITH ORDINALITY AS measured (value, position) USING (position)
    WHERE (measured.value ->> 'expired_running')::bigint > 0 OR (measured.value ->> 'expired_reserved')::bigint > 0
  LOOP
    SELECT coalesce(array_agg(agent.agent_id), '{}') INTO v_found
    FROM {{agents}} AS agent
    WHERE (CASE WHEN v_identity = '{}' THEN agent.metadata IS NOT NULL ELSE agent.metadata @> v_identity END)
      AND agent.status = 'running' AND agent.lease_expires_at <= clock_timestamp();
    v_matching := v_matching || v_found;
  END LOOP;

  SELECT coalesce(array_agg(locked.agent_id), '{}') INTO v_found
  FROM (
    SELECT agent.agent_id FROM {{agents}} AS agent
    WHERE agent.agent_id = ANY (v_matching) AND agent.agent_id <> p_agent
      AND agent.status = 'running' AND agent.run_id IS NOT NULL AND agent.lease_expires_at <= clock_timestamp()
    ORDER BY agent.agent_id FOR NO KEY UPDATE SKIP LOCKED
  ) AS locked;

  UPDATE {{agents}} AS agent SET lease_expires_at = NULL
  WHERE agent.agent_id = ANY (v_found) AND agent.status = 'running' AND agent.lease_expires_at <= clock_timestamp();

  RETURN FOUND;
END $legion$
