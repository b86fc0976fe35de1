package store_test

import (
	"context"
	"slices"
	"sync"
	"time"

	"gorm.io/gorm/logger"
)

// recorder is a logger of the application's that keeps what GORM hands it.
type recorder struct {
	mutex  sync.Mutex
	traces []trace
}

type trace struct {
	sql string
	err error
}

func (r *recorder) LogMode(logger.LogLevel) logger.Interface { return r }
func (r *recorder) Info(context.Context, string, ...any)     {}
func (r *recorder) Warn(context.Context, string, ...any)     {}
func (r *recorder) Error(context.Context, string, ...any)    {}

func (r *recorder) Trace(_ context.Context, _ time.Time, describe func() (string, int64), err error) {
	sql, _ := describe()

	r.mutex.Lock()
	defer r.mutex.Unlock()

	r.traces = append(r.traces, trace{sql: sql, err: err})
}

func (r *recorder) reset() {
	r.mutex.Lock()
	defer r.mutex.Unlock()

	r.traces = nil
}

func (r *recorder) lines() []trace {
	r.mutex.Lock()
	defer r.mutex.Unlock()

	return slices.Clone(r.traces)
}
