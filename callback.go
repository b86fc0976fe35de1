package legion

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"
	"gorm.io/gorm/schema"

	"github.com/legion-gorm/legion/internal/database"
	"github.com/legion-gorm/legion/internal/fault"
	"github.com/legion-gorm/legion/limiter"
)

// Limited is a model that says what limits it. The plugin enforces the rules before
// each INSERT of such a model, in the same transaction, so that a denied row is not
// created and a failed INSERT takes the admission back:
//
//	func (c *Chat) LegionRules(ctx context.Context) (string, []limiter.Rule, error) {
//		return c.ID, []limiter.Rule{{Identity: limiter.Identity{"tenant": c.Tenant}, Policy: policy}}, nil
//	}
//
// LegionRules returns the agent's ID and its rules. No rules: this row is not limited.
// An error ends the create, and so does a panic, as a [PanicError]. It runs after
// BeforeCreate, also for Save, FirstOrCreate and associations, and also where SkipHooks
// leaves the hooks out. A key that the database makes is not known by then: the ID of the
// agent is one that the application makes. Where it works with the database, it passes
// on no *gorm.DB of the application's, which would wait for the create's own connection.
//
// The rows of a batch are enforced together, in their order, each after its
// predecessors: one denial denies the batch. Where an INSERT has ON CONFLICT, as upserts
// and the saving of associations do, rows whose primary key exists are not enforced.
//
// Each batch of CreateInBatches is a statement of its own, and so is each association:
// they are enforced one after the other in one transaction, which can deadlock with
// others, see [Retryable].
//
// Under SkipDefaultTransaction the admission and the INSERT share a transaction of ours. An
// association that the row belongs to was saved before it began, and stays after a denial.
//
// What it cannot see: SQL of the application's own, bulk copies, and creates from a map
// with no more than a Table. A create of the model from a map is an error, since there is
// no value to ask, and so is a LegionRules of another signature.
type Limited interface {
	LegionRules(ctx context.Context) (agentID string, rules []limiter.Rule, err error)
}

// skipKey is the key of a db.Set.
const skipKey = "legion:skip"

// Skip returns a session whose creates are not enforced by [Limited] models' rules, for
// rows that stand for no new work: an import, a restore, a test's fixture.
//
//	legion.Skip(db).Create(&chat)
func Skip(db *gorm.DB) *gorm.DB { return db.Set(skipKey, true) }

// PanicError is a panic of an application's LegionRules. The text of the error names the
// model and leaves the value out, which may be a user's.
type PanicError struct {
	// Value is what was passed to panic.
	Value any

	// Stack is where it happened, as debug.Stack prints it.
	Stack []byte

	model string
}

// Error implements error.
func (e *PanicError) Error() string {
	return fmt.Sprintf("legion: LegionRules of %s panicked: see Value and Stack of the PanicError", e.model)
}

// Unwrap returns the panic's value if it is an error, or nil.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)

	return err
}

// startedKey marks a statement whose transaction enforceCreate began.
const startedKey = "legion:started_transaction"

var (
	limitedType = reflect.TypeFor[Limited]()

	// limitedModels remembers which models are Limited, so that the others cost one
	// look-up.
	limitedModels sync.Map // reflect.Type -> bool
)

// isLimited reports whether the model has LegionRules, of whatever signature.
func isLimited(statement *gorm.Statement) bool {
	if statement.Schema == nil {
		return false
	}

	model := statement.Schema.ModelType
	if known, ok := limitedModels.Load(model); ok {
		return known.(bool) //nolint:forcetypeassert // only bools are stored, here
	}

	_, limited := reflect.PointerTo(model).MethodByName("LegionRules")
	limitedModels.Store(model, limited)

	return limited
}

func errNoAgentID(model *schema.Schema) error {
	return fmt.Errorf("%w: LegionRules of %s returns an empty one: it runs before the INSERT, when a key that the database makes "+
		"is not known yet, so make the ID in the application", fault.ErrInvalidAgentID, model.Name)
}

// errNotLimited is for a model that means to be limited. To ignore it would be to allow
// everything.
func errNotLimited(model *schema.Schema) error {
	return fmt.Errorf("%w: LegionRules of %s has another signature than that of legion.Limited: "+
		"make it LegionRules(context.Context) (string, []limiter.Rule, error)", fault.ErrInvalidConfig, model.Name)
}

// enforceCreate is the callback before the INSERT.
func enforceCreate(db *gorm.DB) {
	if db.Error != nil || db.DryRun || !isLimited(db.Statement) {
		return
	}

	if skip, ok := db.Get(skipKey); ok && skip == true {
		return
	}

	if err := enforceStatement(db); err != nil {
		_ = db.AddError(err)
	}
}

func enforceStatement(db *gorm.DB) error {
	rows, err := limitedRows(db.Statement)
	if err != nil {
		return err
	}

	if _, upserts := db.Statement.Clauses["ON CONFLICT"]; upserts {
		// In the transaction, since outside a resolver plugin would ask a replica.
		if err := ensureTransaction(db); err != nil {
			return err
		}

		if rows, err = withoutExisting(db, rows); err != nil {
			return err
		}
	}

	var admissions []limiter.Admission

	for _, row := range rows {
		admission, err := askRules(db.Statement.Context, row)
		if err != nil {
			return err
		}

		if len(admission.Rules) == 0 {
			continue
		}

		if admission.AgentID == "" {
			return errNoAgentID(db.Statement.Schema)
		}

		admissions = append(admissions, admission)
	}

	if len(admissions) == 0 {
		return nil
	}

	if err := ensureTransaction(db); err != nil {
		return err
	}

	return limiter.EnforceAll(db.Session(&gorm.Session{NewDB: true}), admissions...)
}

// ensureTransaction begins a transaction where SkipDefaultTransaction has left none: the
// admission and the INSERT need one all the same.
func ensureTransaction(db *gorm.DB) error {
	if database.InTransaction(db) {
		return nil
	}

	began := db.Session(&gorm.Session{NewDB: true}).Begin()
	if began.Error != nil {
		return began.Error
	}

	db.Statement.ConnPool = began.Statement.ConnPool
	db.InstanceSet(startedKey, true)

	return nil
}

// finishCreate ends the transaction that ensureTransaction began.
func finishCreate(db *gorm.DB) {
	// Asking first whether the model is limited keeps this free for all others.
	if !isLimited(db.Statement) {
		return
	}

	if _, started := db.InstanceGet(startedKey); !started {
		return
	}

	if db.Error == nil {
		db.Commit()
	} else if err := rollback(db.Statement); err != nil {
		_ = db.AddError(err)
	}

	db.Statement.ConnPool = db.ConnPool
}

// rollback is quiet where the context has ended the transaction already. GORM would put
// that in front of the error that matters, and errors.Is would see no other.
func rollback(statement *gorm.Statement) error {
	transaction, ok := statement.ConnPool.(gorm.TxCommitter)
	if !ok {
		return nil
	}

	if err := transaction.Rollback(); statement.Context.Err() == nil && !errors.Is(err, sql.ErrTxDone) {
		return err
	}

	return nil
}

// limitedRows returns the structs that the statement inserts.
func limitedRows(statement *gorm.Statement) ([]reflect.Value, error) {
	value, model := statement.ReflectValue, statement.Schema.ModelType
	if !reflect.PointerTo(model).Implements(limitedType) {
		return nil, errNotLimited(statement.Schema)
	}

	rows := []reflect.Value{value}

	if value.Kind() == reflect.Slice || value.Kind() == reflect.Array {
		rows = make([]reflect.Value, value.Len())
		for i := range rows {
			rows[i] = reflect.Indirect(value.Index(i))
		}
	}

	for _, row := range rows {
		if !row.IsValid() || row.Type() != model {
			return nil, errNotModel(statement.Schema)
		}
	}

	return rows, nil
}

func errNotModel(model *schema.Schema) error {
	return fmt.Errorf("%w: %s has LegionRules and is created from nil, a map or another type, so there is no value to ask: "+
		"create it from its own struct, or leave the rules out with legion.Skip", fault.ErrInvalidConfig, model.Name)
}

// maxExistenceChecks bounds the size of one query, and how long it is planned.
const maxExistenceChecks = 500

// withoutExisting leaves out the rows whose primary key is in the table already, soft
// deleted or not: an upsert does not start them.
//
// The database compares the keys. What GORM reads back need not equal what it has
// written: a time is rounded, a char is padded, a Valuer converts.
func withoutExisting(db *gorm.DB, rows []reflect.Value) ([]reflect.Value, error) {
	session, err := database.Session(db)
	if err != nil {
		return nil, err
	}

	var started []reflect.Value

	for chunk := range slices.Chunk(rows, maxExistenceChecks) {
		query := clause.Expr{SQL: "SELECT unnest(ARRAY["}

		for i, row := range chunk {
			if i > 0 {
				query.SQL += ", "
			}

			addExistenceCheck(&query, db.Statement, row)
		}

		query.SQL += "])"

		var exist []bool
		if err := session.Raw("?", query).Scan(&exist).Error; err != nil {
			return nil, err
		}

		for i, row := range chunk {
			if !exist[i] {
				started = append(started, row)
			}
		}
	}

	return started, nil
}

// addExistenceCheck adds whether the primary key of row is in the table: false where the
// database is to make a part of it.
func addExistenceCheck(query *clause.Expr, statement *gorm.Statement, row reflect.Value) {
	var (
		conditions []string
		vars       = []any{clause.Table{Name: statement.Table}}
	)

	if statement.TableExpr != nil {
		vars[0] = *statement.TableExpr // as db.Table was told, which may be with an alias
	}

	for _, field := range statement.Schema.PrimaryFields {
		value, zero := field.ValueOf(statement.Context, row)

		switch {
		case zero && field.DefaultValueInterface != nil:
			value = field.DefaultValueInterface
		case zero && field.HasDefaultValue:
			query.SQL += "false"

			return
		}

		conditions = append(conditions, "? = ?")
		vars = append(vars, clause.Column{Name: field.DBName}, value)
	}

	if len(conditions) == 0 {
		query.SQL += "false"

		return
	}

	query.SQL += "EXISTS (SELECT 1 FROM ? WHERE " + strings.Join(conditions, " AND ") + ")"
	query.Vars = append(query.Vars, vars...)
}

// askRules calls LegionRules. A panic that went on through GORM would leave the
// transaction open, with its locks.
func askRules(ctx context.Context, row reflect.Value) (admission limiter.Admission, err error) {
	defer func() {
		if value := recover(); value != nil {
			err = &PanicError{Value: value, Stack: debug.Stack(), model: row.Type().String()}
		}
	}()

	pointer := reflect.New(row.Type())
	if row.CanAddr() {
		pointer = row.Addr()
	} else {
		pointer.Elem().Set(row)
	}

	limited := pointer.Interface().(Limited) //nolint:forcetypeassert // isLimited has checked the type
	admission.AgentID, admission.Rules, err = limited.LegionRules(ctx)

	return admission, err
}
