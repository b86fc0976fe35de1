package pgtest

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"gorm.io/gorm"
)

// OpenForExample is [Open] for an Example function, which has no testing.TB to pass. The
// database is there until done is called. What would fail a test is a panic.
func OpenForExample(options ...gorm.Option) (db *gorm.DB, done func()) {
	stand := new(standIn)

	return Open(stand, options...), stand.done
}

// standIn is as much of a testing.TB as this package asks for.
type standIn struct {
	testing.TB // nil: what it asks for beyond the methods below is a mistake

	cleanups []func()
}

func (*standIn) Helper()                           {}
func (*standIn) Context() context.Context          { return context.Background() }
func (s *standIn) Cleanup(cleanup func())          { s.cleanups = append(s.cleanups, cleanup) }
func (*standIn) Error(arguments ...any)            { panic(fmt.Sprint(arguments...)) }
func (*standIn) Errorf(text string, values ...any) { panic(fmt.Sprintf(text, values...)) }
func (*standIn) Fatal(arguments ...any)            { panic(fmt.Sprint(arguments...)) }
func (*standIn) Fatalf(text string, values ...any) { panic(fmt.Sprintf(text, values...)) }

func (s *standIn) done() {
	for _, cleanup := range slices.Backward(s.cleanups) {
		cleanup()
	}
}
