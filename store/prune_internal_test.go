package store

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/models"
)

func TestIdentitiesAreJudgedWithTheIndexOnMetadata(t *testing.T) {
	t.Parallel()

	db := pgtest.Open(t)
	require.NoError(t, db.AutoMigrate(&models.LegionAgent{}))
	require.NoError(t, db.Table("legion_agents_identities").AutoMigrate(&models.LegionIdentity{}))
	require.NoError(t, db.Exec(`INSERT INTO legion_agents (agent_id, metadata)
		SELECT n::text, jsonb_build_object('tenant', n / 10, 'user', n) FROM generate_series(1, 20000) AS n`).Error)
	require.NoError(t, db.Exec(`INSERT INTO legion_agents_identities (identity)
		SELECT jsonb_build_object('tenant', n) FROM generate_series(1, 2000) AS n`).Error)
	require.NoError(t, db.Exec(`ANALYZE legion_agents, legion_agents_identities`).Error)

	var keys string
	require.NoError(t, db.Raw(`SELECT jsonb_agg(identity::text) FROM (SELECT identity FROM legion_agents_identities LIMIT ?) AS batch`, pruneBatch).
		Scan(&keys).Error)

	statement := db.ToSQL(func(tx *gorm.DB) *gorm.DB {
		return tx.Exec("?", deleteIdentitiesStatement(clause.Table{Name: "legion_agents_identities"}, clause.Table{Name: "legion_agents"}, keys))
	})

	var plan []string
	require.NoError(t, db.Raw("EXPLAIN "+statement).Scan(&plan).Error)

	text := strings.Join(plan, "\n")
	require.Contains(t, text, "Index Cond: (metadata @> registered.identity)")
	require.NotContains(t, text, "Seq Scan on legion_agents agent")
}
