UPDATE "app"."Agents" AS agent
SET usage = (CASE WHEN (CASE jsonb_typeof(agent.usage) WHEN 'array' THEN jsonb_array_length(agent.usage) ELSE 0 END) < 512 THEN agent.usage ELSE (
  SELECT jsonb_agg(CASE WHEN bucket.at IS NULL THEN bucket.element ELSE bucket.folded END ORDER BY bucket.position)
  FROM (
    SELECT min(entry.position) AS position,
      max(entry.at) AS at,
      (array_agg(entry.element) FILTER (WHERE entry.at IS NULL))[1] AS element,
      jsonb_build_object(
        'at', max(entry.at),
        'folded', least(9223372036854775807, sum(greatest(1, CASE jsonb_typeof(entry.element -> 'folded') WHEN 'number' THEN least(9223372036854775807, greatest(0, (entry.element -> 'folded')::numeric)) ELSE 0 END))),
        'total_tokens', least(9223372036854775807, sum(CASE jsonb_typeof(entry.element -> 'total_tokens') WHEN 'number' THEN least(9223372036854775807, greatest(0, (entry.element -> 'total_tokens')::numeric)) ELSE 0 END)),
        'input_tokens', least(9223372036854775807, sum(CASE jsonb_typeof(entry.element -> 'input_tokens') WHEN 'number' THEN least(9223372036854775807, greatest(0, (entry.element -> 'input_tokens')::numeric)) ELSE 0 END)),
        'output_tokens', least(9223372036854775807, sum(CASE jsonb_typeof(entry.element -> 'output_tokens') WHEN 'number' THEN least(9223372036854775807, greatest(0, (entry.element -> 'output_tokens')::numeric)) ELSE 0 END)),
        'evals', least(9223372036854775807, sum(CASE jsonb_typeof(entry.element -> 'evals') WHEN 'number' THEN least(9223372036854775807, greatest(0, (entry.element -> 'evals')::numeric)) ELSE 0 END))) AS folded
    FROM (
      SELECT foldable.element, foldable.position, foldable.at,
        CASE
          WHEN foldable.at <= foldable.now - 32054400000 THEN 64108800000
          WHEN foldable.at <= foldable.now - 2678400000 THEN 604800000
          WHEN foldable.at <= foldable.now - 604800000 THEN 86400000
          WHEN foldable.at <= foldable.now - 3600000 THEN 3600000
          WHEN foldable.at <= foldable.now - 0 THEN 60000
        END AS step
      FROM (
        SELECT timed.element, timed.position, timed.now,
          CASE WHEN timed.position <= timed.length - 128 AND timed.at BETWEEN 0 AND timed.now THEN timed.at END AS at
        FROM (
          SELECT raw.element, raw.position, usage.length, usage.now, (CASE jsonb_typeof(raw.element -> 'at') WHEN 'number' THEN (raw.element ->> 'at')::numeric END) AS at
          FROM (SELECT jsonb_array_length(agent.usage) AS length, extract(epoch FROM clock_timestamp()) * 1000 AS now OFFSET 0) AS usage
          CROSS JOIN LATERAL jsonb_array_elements(agent.usage) WITH ORDINALITY AS raw (element, position)
        ) AS timed
      ) AS foldable
    ) AS entry
    GROUP BY entry.step, floor(entry.at / entry.step), CASE WHEN entry.at IS NULL THEN entry.position END
  ) AS bucket
) END) || jsonb_build_array($1::jsonb || jsonb_build_object('at', least($2::bigint, ceil(extract(epoch FROM clock_timestamp()) * 1000)::bigint))),
  updated_at = clock_timestamp()
WHERE agent.agent_id = $3 AND NOT agent.usage @> jsonb_build_array(jsonb_build_object('id', $4::text))
