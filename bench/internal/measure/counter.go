package measure

import (
	"context"
	"net"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
)

// A Counter counts what the connections that it watches do. The zero value is ready.
type Counter struct {
	statements atomic.Int64
	roundTrips atomic.Int64
}

// Counts are what a Counter has seen.
type Counts struct {
	// Statements were sent, those that begin and end transactions among them.
	Statements int64

	// RoundTrips are how often a client has waited for an answer after it had sent
	// something.
	RoundTrips int64
}

// Watch makes the counter see every connection that is opened with config.
func (c *Counter) Watch(config *pgx.ConnConfig) {
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		opened, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}

		return &connection{Conn: opened, roundTrips: &c.roundTrips}, nil
	}
	config.Tracer = tracer{&c.statements}
}

// Counts returns what was counted so far.
func (c *Counter) Counts() Counts {
	return Counts{Statements: c.statements.Load(), RoundTrips: c.roundTrips.Load()}
}

// Since returns what was counted after earlier.
func (c *Counter) Since(earlier Counts) Counts {
	now := c.Counts()

	return Counts{Statements: now.Statements - earlier.Statements, RoundTrips: now.RoundTrips - earlier.RoundTrips}
}

// connection counts a round trip where the first read follows a write. What was sent in
// one go, or answered in several pieces, is one.
type connection struct {
	net.Conn

	roundTrips *atomic.Int64
	asked      atomic.Bool
}

// Write implements net.Conn.
func (c *connection) Write(data []byte) (int, error) {
	c.asked.Store(true)

	return c.Conn.Write(data) //nolint:wrapcheck // a net.Conn hands on what its connection says
}

// Read implements net.Conn.
func (c *connection) Read(data []byte) (int, error) {
	if c.asked.Swap(false) {
		c.roundTrips.Add(1)
	}

	return c.Conn.Read(data) //nolint:wrapcheck // as Write
}

// tracer counts statements, alone or in a batch.
type tracer struct{ statements *atomic.Int64 }

var (
	_ pgx.QueryTracer = tracer{}
	_ pgx.BatchTracer = tracer{}
)

// TraceQueryStart implements pgx.QueryTracer.
func (t tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	t.statements.Add(1)

	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TraceBatchStart implements pgx.BatchTracer.
func (tracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

// TraceBatchQuery implements pgx.BatchTracer.
func (t tracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {
	t.statements.Add(1)
}

// TraceBatchEnd implements pgx.BatchTracer.
func (tracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}
