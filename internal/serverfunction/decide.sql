CREATE OR REPLACE FUNCTION {{decide}}(p_request jsonb)
RETURNS jsonb LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $legion$
-- {{marker}}
-- One pass through the protocol of locks.go. A denial that has to leave nothing behind, of
-- what was written or locked before it, is raised; the measurement is then the error's
-- detail.
DECLARE
  v_agent constant text := p_request ->> 'agent';
  v_merged constant jsonb := p_request -> 'merged';
  v_rules constant jsonb := p_request -> 'rules';
  v_turn constant jsonb := nullif(p_request -> 'turn', 'null');
  v_requested constant numeric := coalesce((p_request #>> '{turn,reserve}')::numeric, 0);
  v_lease constant interval := (p_request ->> 'lease_us')::bigint * interval '1 microsecond';
  v_began constant timestamptz := clock_timestamp();
  v_waited bigint;
  v_lock record;
  v_own record;
  v_known jsonb[];
  v_locked boolean;
  v_measured jsonb;
  v_begun boolean;
  v_revoked boolean := false;
  v_registered boolean := false;

  -- The statement is a transaction of its own, by the caller's word, and has written nothing.
  v_alone constant boolean := NOT (p_request -> 'joined')::boolean AND pg_current_xact_id_if_assigned() IS NULL;
  v_written bigint;
BEGIN
  IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
    RAISE EXCEPTION USING ERRCODE = 'LG003', MESSAGE = current_setting('transaction_isolation');
  END IF;

  -- 1. Agent and field locks, in the order of their keys. The caller has sorted them.
  FOR v_lock IN
    SELECT (entry.value ->> 0)::bigint AS key, (entry.value ->> 1)::boolean AS exclusive
    FROM jsonb_array_elements(p_request -> 'locks') WITH ORDINALITY AS entry (value, position) ORDER BY entry.position
  LOOP
    IF v_lock.exclusive THEN
      PERFORM pg_advisory_xact_lock(v_lock.key);
    ELSE
      PERFORM pg_advisory_xact_lock_shared(v_lock.key);
    END IF;
  END LOOP;

  -- 2. Identity locks, in jsonb's order. This is a statement of its own: its snapshot comes
  -- after the locks above.
  SELECT coalesce(array_agg(registered.identity), '{}') INTO v_known
  FROM (
    SELECT identity.identity FROM {{identities}} AS identity
    WHERE identity.identity = ANY (ARRAY(SELECT candidate.value FROM jsonb_array_elements(p_request -> 'candidates') AS candidate))
    ORDER BY identity.identity FOR UPDATE
  ) AS registered;

  v_waited := (extract(epoch FROM clock_timestamp() - v_began) * 1000000)::bigint;

  -- An own identity that is not registered is registered here, under the exclusive lock on
  -- one of its fields. That is only tried for, so nothing waits. Nor does the insertion:
  -- whoever inserts the same identity holds such a lock, and cannot while the shared ones
  -- of step 1 are held. Everyone has no field, so it is left to the caller.
  FOR v_own IN
    SELECT entry.value -> 'identity' AS identity, entry.value -> 'fields' AS fields
    FROM jsonb_array_elements(p_request -> 'own') WITH ORDINALITY AS entry (value, position)
    WHERE NOT (entry.value -> 'identity') = ANY (v_known) ORDER BY entry.position
  LOOP
    v_locked := false;

    FOR v_lock IN SELECT field.value::bigint AS key FROM jsonb_array_elements_text(v_own.fields) AS field LOOP
      v_locked := pg_try_advisory_xact_lock(v_lock.key);
      EXIT WHEN v_locked;
    END LOOP;

    IF NOT v_locked THEN
      RAISE EXCEPTION USING ERRCODE = 'LG002', MESSAGE = 'an identity is to be registered, and its fields are busy';
    END IF;

    INSERT INTO {{identities}} (identity) VALUES (v_own.identity) ON CONFLICT (identity) DO NOTHING;
    v_registered := true;
  END LOOP;

  -- 4. Measure, and 3. revoke where expired slots decide; then measure again. Whether the
  -- turn has begun already, or cannot, comes before the rules.
  FOR v_round IN 1..2 LOOP
    v_measured := {{measure}}(v_agent, v_merged, v_rules, v_requested) || jsonb_build_object('waited', v_waited);
    v_begun := v_turn IS NOT NULL AND (v_measured -> 'live')::boolean AND v_measured ->> 'run_id' = v_turn ->> 'run_id';

    IF v_turn IS NOT NULL AND NOT v_begun AND ((v_measured -> 'live')::boolean
      OR v_measured ->> 'run_id' = v_turn ->> 'run_id' AND NOT (v_measured -> 'running')::boolean) THEN
      RAISE EXCEPTION USING ERRCODE = 'LG004', MESSAGE = 'the turn cannot begin', DETAIL = v_measured::text;
    END IF;

    EXIT WHEN v_round = 2 OR v_begun OR NOT (v_measured -> 'revocable')::boolean;

    PERFORM FROM {{agents}} AS agent WHERE agent.agent_id = v_agent FOR NO KEY UPDATE;
    v_revoked := {{revoke}}(v_agent, v_rules, v_measured -> 'groups');
  END LOOP;

  IF (v_measured -> 'denied')::boolean AND NOT v_begun THEN
    IF NOT v_alone OR v_registered OR v_revoked THEN
      RAISE EXCEPTION USING ERRCODE = 'LG001', MESSAGE = 'a limit is exceeded', DETAIL = v_measured::text;
    END IF;

    -- After row locks the commit would wait for a flush of the WAL, for nothing.
    PERFORM set_config('synchronous_commit', 'off', true);

    RETURN v_measured;
  END IF;

  -- 5. Write. See record.go and turn.go for the conditions.
  IF v_begun THEN
    v_written := 0; -- it is given a whole lease below
  ELSIF v_turn IS NOT NULL THEN
    INSERT INTO {{agents}} AS agent
      (agent_id, metadata, started_at, created_at, updated_at, status, run_id, reserved_tokens, lease_expires_at, agent_type, parent_agent_id)
    VALUES (v_agent, v_merged, coalesce({{measured start}}, clock_timestamp()), clock_timestamp(), clock_timestamp(),
      'running', v_turn ->> 'run_id', v_requested, clock_timestamp() + v_lease, v_turn ->> 'agent_type', v_turn ->> 'parent')
    ON CONFLICT (agent_id) DO UPDATE SET
      metadata = excluded.metadata, started_at = coalesce(agent.started_at, excluded.started_at), deleted_at = NULL, updated_at = clock_timestamp(),
      status = 'running', run_id = excluded.run_id, reserved_tokens = excluded.reserved_tokens, lease_expires_at = clock_timestamp() + v_lease,
      agent_type = coalesce(excluded.agent_type, agent.agent_type), parent_agent_id = coalesce(excluded.parent_agent_id, agent.parent_agent_id)
    WHERE NOT {{live agent}};
    GET DIAGNOSTICS v_written = ROW_COUNT;
  ELSIF (p_request -> 'takes_slot')::boolean AND NOT (v_measured -> 'live')::boolean THEN
    INSERT INTO {{agents}} AS agent (agent_id, metadata, started_at, created_at, updated_at, status, lease_expires_at)
    VALUES (v_agent, v_merged, coalesce({{measured start}}, clock_timestamp()), clock_timestamp(), clock_timestamp(), 'running', clock_timestamp() + v_lease)
    ON CONFLICT (agent_id) DO UPDATE SET
      metadata = excluded.metadata, started_at = coalesce(agent.started_at, excluded.started_at), deleted_at = NULL,
      updated_at = CASE WHEN (v_measured -> 'unchanged')::boolean AND {{measured start}} IS NOT NULL THEN agent.updated_at ELSE clock_timestamp() END,
      status = 'running', (run_id, reserved_tokens, lease_expires_at) = (
        SELECT CASE WHEN own.live THEN agent.run_id END,
          CASE WHEN own.live THEN agent.reserved_tokens ELSE 0 END,
          CASE WHEN own.live THEN agent.lease_expires_at ELSE clock_timestamp() + v_lease END
        FROM (SELECT {{live agent}} AS live) AS own);
    v_written := 1;
  ELSIF NOT ((v_measured -> 'unchanged')::boolean AND {{measured start}} IS NOT NULL) THEN
    INSERT INTO {{agents}} AS agent (agent_id, metadata, started_at, created_at, updated_at)
    VALUES (v_agent, v_merged, coalesce({{measured start}}, clock_timestamp()), clock_timestamp(), clock_timestamp())
    ON CONFLICT (agent_id) DO UPDATE SET
      metadata = excluded.metadata, started_at = coalesce(agent.started_at, excluded.started_at), deleted_at = NULL, updated_at = clock_timestamp();
    v_written := 1;
  ELSE
    v_written := 1; -- nothing is left to write

    IF v_alone AND NOT v_registered AND NOT v_revoked THEN
      PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
  END IF;

  IF v_written = 0 THEN
    -- The turn had begun; or its row is live since the measurement, by a renewal that was
    -- on its way, maybe that of this very run.
    UPDATE {{agents}} AS agent SET lease_expires_at = clock_timestamp() + v_lease
    WHERE agent.agent_id = v_agent AND agent.run_id = v_turn ->> 'run_id' AND agent.status = 'running' AND agent.lease_expires_at IS NOT NULL;
    GET DIAGNOSTICS v_written = ROW_COUNT;
  END IF;

  IF v_written = 0 THEN
    RAISE EXCEPTION USING ERRCODE = 'LG005', MESSAGE = 'the agent is running another turn';
  END IF;

  RETURN v_measured || '{"denied": false}';
END $legion$
