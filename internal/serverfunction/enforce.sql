CREATE OR REPLACE FUNCTION {{enforce}}(p_request jsonb)
RETURNS jsonb LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $legion$
-- {{marker}}
-- Decides one call. In a caller's transaction the block is the savepoint: what is no
-- admission is undone, its locks are free, and its measurement or its error is returned.
DECLARE
  v_detail text;
BEGIN
  IF NOT (p_request -> 'joined')::boolean THEN
    RETURN {{decide}}(p_request);
  END IF;

  BEGIN
    RETURN {{decide}}(p_request);
  EXCEPTION
    WHEN SQLSTATE 'LG001' THEN
      GET STACKED DIAGNOSTICS v_detail = PG_EXCEPTION_DETAIL;

      RETURN v_detail::jsonb;
    WHEN OTHERS OR query_canceled THEN
      GET STACKED DIAGNOSTICS v_detail = PG_EXCEPTION_DETAIL;

      -- The caller's transaction goes on, so the error is returned like a verdict.
      RETURN jsonb_build_object('error', jsonb_build_object('code', SQLSTATE, 'message', SQLERRM, 'detail', v_detail));
  END;
END $legion$
