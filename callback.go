package legion

import (
	"context"
	"fmt"
	"reflect"
	"runtime/debug"
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
// leaves the hooks out.
//
// The rows of a batch are enforced together, in their order, each after its
// predecessors: one denial denies the batch. Where an INSERT has ON CONFLICT, as upserts
// and the saving of associations do, rows whose primary key exists are not enforced.
//
// What it cannot see: SQL of the application's own, and bulk copies. A create from a map
// is an error, since there is no value to ask.
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

func isLimited(statement *gorm.Statement) bool {
	if statement.Schema == nil {
		return false
	}

	model := statement.Schema.ModelType
	if known, ok := limitedModels.Load(model); ok {
		return known.(bool) //nolint:forcetypeassert // only bools are stored, here
	}

	limited := reflect.PointerTo(model).Implements(limitedType)
	limitedModels.Store(model, limited)

	return limited
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

	// A session of its own: a query on db would be written into the INSERT.
	tx := db.Session(&gorm.Session{NewDB: true})

	if _, upserts := db.Statement.Clauses["ON CONFLICT"]; upserts {
		if rows, err = withoutExisting(tx, db.Statement, rows); err != nil {
			return err
		}
	}

	var admissions []limiter.Admission

	for _, row := range rows {
		admission, err := askRules(db.Statement.Context, row)
		if err != nil {
			return err
		}

		if len(admission.Rules) > 0 {
			admissions = append(admissions, admission)
		}
	}

	if len(admissions) == 0 {
		return nil
	}

	if !database.InTransaction(db) {
		// SkipDefaultTransaction: the admission and the INSERT need one all the same.
		began := tx.Begin()
		if began.Error != nil {
			return began.Error
		}

		db.Statement.ConnPool = began.Statement.ConnPool
		db.InstanceSet(startedKey, true)

		tx = began
	}

	return limiter.EnforceAll(tx, admissions...)
}

// finishCreate ends the transaction that enforceCreate began.
func finishCreate(db *gorm.DB) {
	// Asking first whether the model is limited keeps this free for all others.
	if !isLimited(db.Statement) {
		return
	}

	if _, started := db.InstanceGet(startedKey); !started {
		return
	}

	if db.Error != nil {
		db.Rollback()
	} else {
		db.Commit()
	}

	db.Statement.ConnPool = db.ConnPool
}

// limitedRows returns the structs that the statement inserts.
func limitedRows(statement *gorm.Statement) ([]reflect.Value, error) {
	value := statement.ReflectValue

	switch value.Kind() {
	case reflect.Struct:
		return []reflect.Value{value}, nil
	case reflect.Slice, reflect.Array:
		rows := make([]reflect.Value, value.Len())

		for i := range rows {
			if rows[i] = reflect.Indirect(value.Index(i)); rows[i].Kind() != reflect.Struct {
				return nil, errNotStruct(statement.Schema)
			}
		}

		return rows, nil
	default:
		return nil, errNotStruct(statement.Schema)
	}
}

func errNotStruct(model *schema.Schema) error {
	return fmt.Errorf("%w: %s has LegionRules and is created from what is no struct, so there is no value to ask: "+
		"create it from a struct, or leave the rules out with legion.Skip", fault.ErrInvalidConfig, model.Name)
}

// withoutExisting leaves out the rows whose primary key is in the table already, soft
// deleted or not: an upsert does not start them.
func withoutExisting(tx *gorm.DB, statement *gorm.Statement, rows []reflect.Value) ([]reflect.Value, error) {
	model := statement.Schema
	ctx := statement.Context

	keys := make([][]any, 0, len(rows))

	for _, row := range rows {
		if key, complete := primaryKey(ctx, model, row); complete {
			keys = append(keys, key)
		}
	}

	if len(keys) == 0 {
		return rows, nil
	}

	found := reflect.New(reflect.SliceOf(model.ModelType))
	column, values := schema.ToQueryValues("", model.PrimaryFieldDBNames, keys)

	err := tx.Table("?", clause.Table{Name: statement.Table}).Unscoped().
		Select(model.PrimaryFieldDBNames).
		Where(clause.IN{Column: column, Values: values}).
		Session(&gorm.Session{SkipHooks: true}).
		Find(found.Interface()).Error
	if err != nil {
		return nil, err
	}

	existing := make(map[string]bool, found.Elem().Len())

	for i := range found.Elem().Len() {
		key, _ := primaryKey(ctx, model, found.Elem().Index(i))
		existing[fmt.Sprint(key...)] = true
	}

	var started []reflect.Value

	for _, row := range rows {
		if key, complete := primaryKey(ctx, model, row); !complete || !existing[fmt.Sprint(key...)] {
			started = append(started, row)
		}
	}

	return started, nil
}

func primaryKey(ctx context.Context, model *schema.Schema, row reflect.Value) (key []any, complete bool) {
	for _, field := range model.PrimaryFields {
		value, zero := field.ValueOf(ctx, row)
		if zero {
			return nil, false
		}

		key = append(key, value)
	}

	return key, len(key) > 0
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
