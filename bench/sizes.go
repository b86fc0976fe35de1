package main

import (
	"context"
	"fmt"
)

// A size is how much disk a table or an index takes.
type size struct {
	relation string
	bytes    int64
	agents   int64
}

// readSizes returns those of the agents' table and of each of its indexes.
func readSizes(ctx context.Context, scene *scene) (sizes []size, err error) {
	rows, err := scene.db.WithContext(ctx).Raw(`
SELECT 'table legion_agents', pg_table_size('legion_agents'), (SELECT count(*) FROM legion_agents)
UNION ALL
(SELECT 'index ' || indexrelid::regclass, pg_relation_size(indexrelid), (SELECT count(*) FROM legion_agents)
FROM pg_index WHERE indrelid = 'legion_agents'::regclass ORDER BY 1)`).Rows()
	if err != nil {
		return nil, fmt.Errorf("read the sizes: %w", err)
	}
	defer func() { _ = rows.Close() }()

	for rows.Next() {
		var size size
		if err := rows.Scan(&size.relation, &size.bytes, &size.agents); err != nil {
			return nil, fmt.Errorf("read the sizes: %w", err)
		}

		sizes = append(sizes, size)
	}

	return sizes, rows.Err()
}
