package legion_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"
	"gorm.io/plugin/dbresolver"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/internal/pgtest"
	"github.com/legion-gorm/legion/limiter"
)

// perTenant are the rules of a row of these tests: two agents for a tenant, by the
// default policy.
func perTenant(tenant string) []limiter.Rule {
	return []limiter.Rule{{Identity: limiter.Identity{"tenant": tenant}}}
}

// Seat has a key of several columns, one of which may be zero.
type Seat struct {
	Hall   string `gorm:"primaryKey"`
	Row    string `gorm:"primaryKey"`
	Number int    `gorm:"primaryKey;autoIncrement:false"`
	Tenant string
}

func (s Seat) LegionRules(context.Context) (string, []limiter.Rule, error) {
	return s.Hall + "/" + s.Row, perTenant(s.Tenant), nil
}

// Folded is a string that the database stores in lower case.
type Folded string

func (f Folded) Value() (driver.Value, error) { return "folded " + string(f), nil }

func (f *Folded) Scan(value any) error {
	text, _ := value.(string)
	*f = Folded(text)

	return nil
}

// The models of keyed rows have one key each, in forms in which Go's value and the
// database's are not the same.
type (
	PointerKeyed struct {
		keyed

		ID *string `gorm:"primaryKey"`
	}
	TimeKeyed struct {
		keyed

		ID time.Time `gorm:"primaryKey"`
	}
	PaddedKeyed struct {
		keyed

		ID string `gorm:"primaryKey;type:char(8)"`
	}
	FoldedKeyed struct {
		keyed

		ID Folded `gorm:"primaryKey;type:text"`
	}
	BytesKeyed struct {
		keyed

		ID []byte `gorm:"primaryKey;type:bytea"`
	}
	JSONKeyed struct {
		keyed

		ID []string `gorm:"primaryKey;type:text;serializer:json"`
	}
)

// keyed is what they have in common. Its rules are promoted.
type keyed struct {
	Agent  string
	Tenant string
}

func (k *keyed) LegionRules(context.Context) (string, []limiter.Rule, error) {
	return k.Agent, perTenant(k.Tenant), nil
}

func TestAnUpsertKnowsItsRowsByTheWholeKey(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)
	require.NoError(t, db.AutoMigrate(&Seat{}))

	upsert := db.Clauses(clause.OnConflict{UpdateAll: true}).Session(&gorm.Session{})
	fill(t, db, "full")

	// Written after each other these keys are the same.
	require.NoError(t, upsert.Create(&Seat{Hall: "a", Row: "bc", Number: 1, Tenant: "acme"}).Error)
	require.ErrorIs(t, upsert.Create(&Seat{Hall: "ab", Row: "c", Number: 1, Tenant: "full"}).Error, limiter.ErrExceeded)
	require.NoError(t, upsert.Create(&Seat{Hall: "a", Row: "bc", Number: 1, Tenant: "full"}).Error, "it is there")

	// A part of a key may be zero, where the database does not make it.
	require.NoError(t, upsert.Create(&Seat{Hall: "a", Row: "bc", Tenant: "acme"}).Error)
	require.NoError(t, upsert.Create(&Seat{Hall: "a", Row: "bc", Tenant: "full"}).Error, "it is there")

	// Of a batch, each row is found by itself, in values as in pointers, slices as in arrays.
	require.NoError(t, upsert.Create(&[]Seat{
		{Hall: "a", Row: "bc", Tenant: "full"}, {Hall: "x", Row: "y", Tenant: "acme"}, {Hall: "a", Row: "bc", Number: 1, Tenant: "full"},
	}).Error)
	require.ErrorIs(t, upsert.Create([2]*Seat{{Hall: "a", Row: "bc", Tenant: "full"}, {Hall: "z", Row: "z", Tenant: "full"}}).Error, limiter.ErrExceeded)
}

// fill lets as many agents start for the tenant as may.
func fill(t *testing.T, db *gorm.DB, tenant string) {
	t.Helper()

	for _, id := range []string{"one of " + tenant, "two of " + tenant} {
		require.NoError(t, limiter.Enforce(db, id, perTenant(tenant)...))
	}

	require.ErrorIs(t, limiter.Enforce(db, "three", perTenant(tenant)...), limiter.ErrExceeded)
}

func TestAnUpsertKnowsItsRowsAsTheDatabaseDoes(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)
	now, id := time.Now(), "a"
	fill(t, db, "full")

	for name, rows := range map[string][2]any{
		"a pointer":                   {&PointerKeyed{ID: &id, keyed: keyed{"pointer", "1"}}, &PointerKeyed{ID: &id, keyed: keyed{"other", "full"}}},
		"a time of nanoseconds":       {&TimeKeyed{ID: now, keyed: keyed{"time", "2"}}, &TimeKeyed{ID: now, keyed: keyed{"other", "full"}}},
		"padded":                      {&PaddedKeyed{ID: "a", keyed: keyed{"padded", "3"}}, &PaddedKeyed{ID: "a", keyed: keyed{"other", "full"}}},
		"a Valuer":                    {&FoldedKeyed{ID: "A", keyed: keyed{"folded", "4"}}, &FoldedKeyed{ID: "A", keyed: keyed{"other", "full"}}},
		"bytes":                       {&BytesKeyed{ID: []byte("a"), keyed: keyed{"bytes", "5"}}, &BytesKeyed{ID: []byte("a"), keyed: keyed{"other", "full"}}},
		"what a serializer writes":    {&JSONKeyed{ID: []string{"a"}, keyed: keyed{"json", "6"}}, &JSONKeyed{ID: []string{"a"}, keyed: keyed{"other", "full"}}},
		"a key in a table of another": {&Thread{ID: "t", Tenant: "7"}, &Thread{ID: "t", Tenant: "full"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			require.NoError(t, db.AutoMigrate(rows[0]))

			upsert := db.Clauses(clause.OnConflict{UpdateAll: true}).Session(&gorm.Session{})
			require.NoError(t, upsert.Create(rows[0]).Error)
			require.NoError(t, upsert.Create(rows[1]).Error, "the second is an update")
		})
	}
}

func TestAnUpsertAsksItsOwnTableAndOnThePrimary(t *testing.T) {
	t.Parallel()

	for name, config := range map[string]*gorm.Config{"default": {}, "SkipDefaultTransaction": {SkipDefaultTransaction: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := setupThreads(t, config)
			require.NoError(t, db.Table("archived_threads").AutoMigrate(&Thread{}))
			require.NoError(t, legion.Skip(db).Create(&Thread{ID: "a", Tenant: "acme"}).Error)

			// A replica that lags: it has no rows.
			replica := setupThreads(t)
			resolver := dbresolver.Register(dbresolver.Config{Replicas: []gorm.Dialector{postgres.Open(pgtest.DSN(replica))}})
			require.NoError(t, db.Use(resolver))
			t.Cleanup(func() {
				require.NoError(t, resolver.Call(func(pool gorm.ConnPool) error {
					if closer, ok := pool.(interface{ Close() error }); ok {
						return closer.Close()
					}

					return nil
				}))
			})

			upsert := db.Clauses(clause.OnConflict{UpdateAll: true}).Session(&gorm.Session{})
			require.NoError(t, upsert.Create(&Thread{ID: "a", Tenant: "acme"}).Error)
			require.Empty(t, agents(t, db.Clauses(dbresolver.Write)), "it is there")
			require.NoError(t, upsert.Table("threads AS thread").Create(&Thread{ID: "a", Tenant: "acme"}).Error)
			require.Empty(t, agents(t, db.Clauses(dbresolver.Write)), "by whatever name")
			require.NoError(t, upsert.Table("archived_threads").Create(&Thread{ID: "a", Tenant: "acme"}).Error)
			require.Equal(t, []string{"a"}, agents(t, db.Clauses(dbresolver.Write)), "there it is not")
		})
	}
}

// Ticket's key is made by the database, and so not known before its INSERT.
type Ticket struct {
	ID     string `gorm:"primaryKey;default:gen_random_uuid()"`
	Tenant string
}

func (t *Ticket) LegionRules(context.Context) (string, []limiter.Rule, error) {
	return t.ID, perTenant(t.Tenant), nil
}

func TestAKeyThatTheDatabaseMakesIsNoAgentID(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)
	require.NoError(t, db.AutoMigrate(&Ticket{}))
	err := db.Create(&Ticket{Tenant: "acme"}).Error
	require.ErrorIs(t, err, limiter.ErrInvalidAgentID)
	require.ErrorContains(t, err, "before the INSERT")

	var count int64

	require.NoError(t, db.Model(&Ticket{}).Count(&count).Error)
	require.Zero(t, count)
}

// The mistaken models mean to be limited.
type (
	WithoutContext  struct{ ID string }
	WithoutAnError  struct{ ID string }
	OfSomethingElse struct{ ID string }
)

func (*WithoutContext) LegionRules() (string, []limiter.Rule, error)            { return "", nil, nil }
func (*WithoutAnError) LegionRules(context.Context) (string, []limiter.Rule)    { return "", nil }
func (OfSomethingElse) LegionRules(context.Context, *gorm.DB) ([]string, error) { return nil, nil }

func TestLegionRulesOfAnotherSignatureAreAnErrorAndNotIgnored(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)

	for _, row := range []any{&WithoutContext{"a"}, &WithoutAnError{"a"}, &OfSomethingElse{"a"}} {
		require.NoError(t, db.AutoMigrate(row))

		for range 2 { // it is remembered
			err := db.Create(row).Error
			require.ErrorIs(t, err, legion.ErrInvalidConfig)
			require.ErrorContains(t, err, "LegionRules(context.Context) (string, []limiter.Rule, error)")
		}

		require.NoError(t, legion.Skip(db).Create(row).Error)
	}
}

func TestARowThatIsNotTheModelsIsAnError(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)

	for name, rows := range map[string]any{
		"nil in a slice":     []*Thread{{ID: "a", Tenant: "acme"}, nil},
		"a struct of others": &Note{ThreadID: "a"},
	} {
		require.ErrorIs(t, db.Model(&Thread{}).Create(rows).Error, legion.ErrInvalidConfig, name)
	}

	require.Empty(t, threads(t, db))
	require.Empty(t, agents(t, db))
	requireNoLocks(t, db)
}

// Chapter's hooks come after the admission.
type Chapter struct {
	ID       string `gorm:"primaryKey"`
	BookID   string
	Tenant   string
	OwnerID  string
	OwnerAs  string
	Fails    error              `gorm:"-"`
	Cancel   context.CancelFunc `gorm:"-"`
	Siblings []*Chapter         `gorm:"many2many:siblings"`
}

func (c *Chapter) LegionRules(context.Context) (string, []limiter.Rule, error) {
	return c.ID, perTenant(c.Tenant), nil
}

func (c *Chapter) AfterCreate(*gorm.DB) error {
	if c.Cancel != nil {
		c.Cancel()
	}

	return c.Fails
}

// Book is limited, and so are its chapters.
type Book struct {
	ID       string `gorm:"primaryKey"`
	Tenant   string
	Chapters []Chapter
	Notes    []Chapter `gorm:"polymorphicType:OwnerAs;polymorphicId:OwnerID"`
}

func (b *Book) LegionRules(context.Context) (string, []limiter.Rule, error) {
	return b.ID, perTenant(b.Tenant), nil
}

func setupBooks(t *testing.T, config *gorm.Config) *gorm.DB {
	t.Helper()

	config.DisableForeignKeyConstraintWhenMigrating = true // a chapter may have no book
	db := setupThreads(t, config, pgtest.MaxOpenConnections(1))
	require.NoError(t, db.AutoMigrate(&Book{}, &Chapter{}))

	return db
}

func requireRows(t *testing.T, db *gorm.DB, count int64, table string) {
	t.Helper()

	var found int64

	require.NoError(t, db.Table(table).Count(&found).Error)
	require.Equal(t, count, found, table)
}

func TestWhatFailsAfterTheAdmissionTakesItBack(t *testing.T) {
	t.Parallel()

	for name, config := range map[string]*gorm.Config{
		"default": {}, "SkipDefaultTransaction": {SkipDefaultTransaction: true},
		"PrepareStmt": {SkipDefaultTransaction: true, PrepareStmt: true, PrepareStmtTTL: 10 * 365 * 24 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := setupBooks(t, config)
			failure := errors.New("the hook fails")

			require.ErrorIs(t, db.Create(&Chapter{ID: "a", Tenant: "acme", Fails: failure}).Error, failure)
			require.Empty(t, agents(t, db))
			requireRows(t, db, 0, "chapters")

			// Parent and children are limited, and the last one is denied.
			err := db.Create(&Book{ID: "b", Tenant: "acme", Chapters: []Chapter{{ID: "c", Tenant: "acme"}, {ID: "d", Tenant: "acme"}}}).Error
			require.ErrorIs(t, err, limiter.ErrExceeded)
			require.Empty(t, agents(t, db))
			requireRows(t, db, 0, "books")
			requireRows(t, db, 0, "chapters")

			require.NoError(t, db.Create(&Book{ID: "b", Tenant: "acme", Notes: []Chapter{{
				ID: "c", Tenant: "acme", Siblings: []*Chapter{{ID: "d", Tenant: "globex"}},
			}}}).Error)
			require.Equal(t, []string{"b", "c", "d"}, agents(t, db))
			requireRows(t, db, 2, "chapters")
			requireRows(t, db, 1, "siblings")

			// A transaction that the context has ended is over already.
			ctx, cancel := context.WithCancel(t.Context())
			err = db.WithContext(ctx).Create(&Chapter{ID: "e", Tenant: "globex", Fails: failure, Cancel: cancel}).Error

			if config.SkipDefaultTransaction {
				require.ErrorIs(t, err, failure, "the reason is not lost")
			}

			require.Error(t, err)
			require.Equal(t, []string{"b", "c", "d"}, agents(t, db))
		})
	}
}

func TestACreateWhoseContextHasEndedLeavesNothing(t *testing.T) {
	t.Parallel()

	for name, config := range map[string]*gorm.Config{"default": {}, "SkipDefaultTransaction": {SkipDefaultTransaction: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := setupBooks(t, config)
			ctx, cancel := context.WithCancel(t.Context())
			cancel()

			require.ErrorIs(t, db.WithContext(ctx).Create(&Thread{ID: "a", Tenant: "acme"}).Error, context.Canceled)
			require.Empty(t, agents(t, db))
			require.NoError(t, db.Create(&Thread{ID: "a", Tenant: "acme"}).Error)
		})
	}
}

func TestABatchCountsAnAgentOnce(t *testing.T) {
	t.Parallel()

	db := setupThreads(t)
	ignore := db.Clauses(clause.OnConflict{DoNothing: true}).Session(&gorm.Session{})

	require.NoError(t, ignore.Create([]*Thread{{ID: "a", Tenant: "acme"}, {ID: "a", Tenant: "acme"}, {ID: "b", Tenant: "acme"}}).Error)
	require.Equal(t, []string{"a", "b"}, agents(t, db))
	require.Equal(t, []string{"a", "b"}, threads(t, db))
	require.NoError(t, db.Session(&gorm.Session{CreateBatchSize: 2, SkipHooks: true}).Create([]*Thread{{ID: "x"}, {ID: "y"}, {ID: "z", Tenant: "globex"}}).Error)
	require.Equal(t, []string{"a", "b", "z"}, agents(t, db))
	require.ErrorIs(t, db.Session(&gorm.Session{CreateBatchSize: 1, SkipHooks: true}).
		Create([]*Thread{{ID: "v", Tenant: "globex"}, {ID: "w", Tenant: "globex"}}).Error, limiter.ErrExceeded)
	require.Equal(t, []string{"a", "b", "z"}, agents(t, db))

	rows := []Thread{{ID: "t", Tenant: "initech"}, {ID: "u", Tenant: "initech"}, {ID: "v", Tenant: "initech"}}
	require.ErrorIs(t, gorm.G[Thread](db).CreateInBatches(t.Context(), &rows, 2), limiter.ErrExceeded)
	require.Equal(t, []string{"a", "b", "z"}, agents(t, db), "the batches before the denied one go with it")
	require.NoError(t, db.Connection(func(one *gorm.DB) error { return one.CreateInBatches(rows[:2], 1).Error }))
	require.Equal(t, []string{"a", "b", "t", "u", "z"}, agents(t, db))
}

// Draft asks the database for its rules, in the transaction that the context carries.
type Draft struct {
	ID       string `gorm:"primaryKey"`
	ForumID  uint
	Forum    Forum
	forumSet bool
}

type transactionKey struct{}

func (d *Draft) LegionRules(ctx context.Context) (string, []limiter.Rule, error) {
	d.forumSet = d.ForumID != 0 // an association that it belongs to is saved before

	var drafts int64

	tx, _ := ctx.Value(transactionKey{}).(*gorm.DB)
	err := tx.WithContext(ctx).Model(&Draft{}).Count(&drafts).Error

	return d.ID, []limiter.Rule{{
		Identity: limiter.Identity{"kind": "draft"}, Policy: limiter.Policy{Window: time.Hour, MaxAgents: limiter.Max(drafts + 1)},
	}}, err
}

func TestLegionRulesMayAskTheTransactionOfTheContext(t *testing.T) {
	t.Parallel()

	db := setupThreads(t, pgtest.MaxOpenConnections(1))
	require.NoError(t, db.AutoMigrate(&Draft{}))
	require.NoError(t, db.Transaction(func(tx *gorm.DB) error {
		tx = tx.WithContext(context.WithValue(t.Context(), transactionKey{}, tx))
		first := Draft{ID: "a", Forum: Forum{Threads: []Thread{{ID: "free"}}}}
		require.NoError(t, tx.Create(&first).Error)
		require.True(t, first.forumSet)

		// A denial leaves the transaction usable.
		require.ErrorIs(t, tx.Create([]*Draft{{ID: "b", ForumID: first.ForumID}, {ID: "c", ForumID: first.ForumID}}).Error, limiter.ErrExceeded)

		return tx.Create(&Draft{ID: "d", ForumID: first.ForumID}).Error
	}))
	require.Equal(t, []string{"a", "d"}, agents(t, db))
	requireRows(t, db, 2, "drafts")
}

func TestCreatesAtOnceAreExact(t *testing.T) {
	t.Parallel()

	for name, config := range map[string]*gorm.Config{"default": {}, "SkipDefaultTransaction": {SkipDefaultTransaction: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := setupThreads(t, config)
			results := make(chan error)

			const writers = 8
			for number := range writers {
				go func() {
					id := string(rune('a' + number))
					results <- db.Create([]*Thread{{ID: id + "1", Tenant: "acme"}, {ID: id + "2", Tenant: id}}).Error
				}()
			}

			admitted := 0

			for range writers {
				if err := <-results; err == nil {
					admitted++
				} else {
					require.ErrorIs(t, err, limiter.ErrExceeded)
				}
			}

			require.Equal(t, 2, admitted)
			require.Len(t, threads(t, db), 4)
			require.Len(t, agents(t, db), 4)
			requireNoLocks(t, db)
		})
	}
}
