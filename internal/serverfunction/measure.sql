CREATE OR REPLACE FUNCTION {{measure}}(p_agent text, p_merged jsonb, p_rules jsonb, p_requested numeric)
RETURNS jsonb LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $legion$
-- {{marker}}
-- Measures the rules of one agent. It is STABLE, so that all its queries see the snapshot
-- of the statement that calls it: one moment for all rules.
DECLARE
  v_now timestamptz := clock_timestamp();
  v_own record;
  v_rule record;
  v_groups jsonb := '[]';
  v_agents bigint;
  v_running bigint;
  v_expired_running bigint;
  v_reserved bigint;
  v_expired_reserved bigint;
  v_tokens bigint;
  v_evals bigint;
  v_used numeric;
  v_from numeric;
  v_denied boolean := false;
  v_revocable boolean := false;
BEGIN
  SELECT own.started_at, coalesce(own.metadata = p_merged AND own.deleted_at IS NULL, false) AS unchanged,
    {{live own}} AS live, own.run_id, coalesce(own.status = 'running', false) AS running
  INTO v_own
  FROM {{agents}} AS own WHERE own.agent_id = p_agent;

  FOR v_rule IN
    SELECT rule.identity, rule.window_us * interval '1 microsecond' AS span, rule.max_agents, rule.max_running, rule.max_tokens, rule.max_evals
    FROM jsonb_to_recordset(p_rules) AS rule (identity jsonb, window_us bigint, max_agents bigint, max_running bigint, max_tokens bigint, max_evals bigint)
  LOOP
    v_from := extract(epoch FROM v_now - v_rule.span) * 1000;
    v_agents := 0;
    v_running := 0;
    v_expired_running := 0;
    v_reserved := 0;
    v_expired_reserved := 0;
    v_tokens := 0;
    v_evals := 0;

    -- Everyone is spelled without containment, which would read the whole index. The
    -- materialized query keeps the LIMIT from talking the planner into a scan that hopes
    -- to stop early.
    IF v_rule.max_agents IS NOT NULL AND v_rule.identity = '{}' THEN
      WITH started AS MATERIALIZED (
        SELECT FROM {{agents}} AS agent
        WHERE agent.metadata IS NOT NULL AND agent.agent_id <> p_agent AND agent.started_at > v_now - v_rule.span
      ) SELECT count(*) INTO v_agents FROM (SELECT FROM started LIMIT least(v_rule.max_agents, 9223372036854775806) + 1) AS counted;
    ELSIF v_rule.max_agents IS NOT NULL THEN
      WITH started AS MATERIALIZED (
        SELECT FROM {{agents}} AS agent
        WHERE agent.metadata @> v_rule.identity AND agent.agent_id <> p_agent AND agent.started_at > v_now - v_rule.span
      ) SELECT count(*) INTO v_agents FROM (SELECT FROM started LIMIT least(v_rule.max_agents, 9223372036854775806) + 1) AS counted;
    END IF;

    IF (v_rule.max_running IS NOT NULL OR v_rule.max_tokens IS NOT NULL) AND v_rule.identity = '{}' THEN
      SELECT {{slots}}
      INTO v_running, v_expired_running, v_reserved, v_expired_reserved
      FROM {{agents}} AS agent
      WHERE agent.metadata IS NOT NULL AND {{holds slot}};
    ELSIF v_rule.max_running IS NOT NULL OR v_rule.max_tokens IS NOT NULL THEN
      SELECT {{slots}}
      INTO v_running, v_expired_running, v_reserved, v_expired_reserved
      FROM {{agents}} AS agent
      WHERE agent.metadata @> v_rule.identity AND {{holds slot}};
    END IF;

    IF (v_rule.max_tokens IS NOT NULL OR v_rule.max_evals IS NOT NULL) AND v_rule.identity = '{}' THEN
      SELECT {{sums}} INTO v_tokens, v_evals
      FROM {{agents}} AS agent {{entries}}
      WHERE (agent.metadata IS NOT NULL OR agent.agent_id = p_agent) AND {{within}};
    ELSIF v_rule.max_tokens IS NOT NULL OR v_rule.max_evals IS NOT NULL THEN
      SELECT {{sums}} INTO v_tokens, v_evals
      FROM {{agents}} AS agent {{entries}}
      WHERE (agent.metadata @> v_rule.identity OR agent.agent_id = p_agent) AND {{within}};
    END IF;

    v_groups := v_groups || jsonb_build_object('agents', v_agents, 'running', v_running, 'expired_running', v_expired_running,
      'reserved', v_reserved, 'expired_reserved', v_expired_reserved, 'tokens', v_tokens, 'evals', v_evals);

    -- The caller counts as started unless it started before the window.
    v_used := v_agents + CASE WHEN v_own.started_at IS NULL OR v_own.started_at > v_now - v_rule.span THEN 1 ELSE 0 END;
    v_denied := v_denied OR coalesce(v_used > v_rule.max_agents OR v_rule.max_agents = 0, false);

    IF v_running + 1 > v_rule.max_running OR v_rule.max_running = 0 THEN
      v_denied := true;
      v_revocable := v_revocable OR v_expired_running > 0;
    END IF;

    v_used := least(v_tokens::numeric + v_reserved, 9223372036854775807);

    IF v_used >= v_rule.max_tokens OR p_requested > v_rule.max_tokens - v_used THEN
      v_denied := true;
      v_revocable := v_revocable OR v_expired_reserved > 0;
    END IF;

    v_denied := v_denied OR coalesce(v_evals >= v_rule.max_evals, false);
  END LOOP;

  RETURN jsonb_build_object(
    'now', (extract(epoch FROM v_now) * 1000000)::bigint,
    'started_at', (extract(epoch FROM v_own.started_at) * 1000000)::bigint,
    'unchanged', coalesce(v_own.unchanged, false), 'live', coalesce(v_own.live, false),
    'run_id', v_own.run_id, 'running', coalesce(v_own.running, false),
    'groups', v_groups, 'denied', v_denied, 'revocable', v_revocable);
END $legion$
