// Package testhook lets tests pause an admission at the points that matter and
// remove a part of its protocol, to show that the part is needed. It travels with
// the context. Outside this module nobody can import it, and without it a call
// costs one look into its context.
package testhook

import "context"

// A Point is a moment of an admission.
type Point string

// The points, in their order. Each comes after the step that it names.
const (
	FieldLocks    Point = "field locks"
	IdentityLocks Point = "identity locks"
	Expired       Point = "expired" // only where expired slots are about to be taken
	Revoked       Point = "revoked" // only then
	Measured      Point = "measured"
	Recorded      Point = "recorded"
)

// Hooks change one call. The zero value changes nothing.
type Hooks struct {
	// At is called at each point, on the goroutine of the call.
	At func(Point)

	// WithoutLocks takes no lock at all.
	WithoutLocks bool

	// WithoutAgentLock leaves out the exclusive lock on the agent's ID.
	WithoutAgentLock bool

	// WithoutFieldLocks leaves out the shared locks on the fields of the merged
	// identity, and the exclusive ones of a registration.
	WithoutFieldLocks bool

	// OwnIdentitiesOnly locks the identities of the call's rules, and none that are
	// merely contained in the merged one.
	OwnIdentitiesOnly bool

	// Unsorted locks identities in random order.
	Unsorted bool

	// RegisterInside registers identities in the admission's own transaction, under
	// locks that it then keeps, as it is done inside a caller's transaction.
	RegisterInside bool

	// ExpiredAreFree counts slots and reservations whose lease is over as free, and does
	// not take them.
	ExpiredAreFree bool

	// RevokeUnchecked takes them as they were found, and does not lock them and look again.
	RevokeUnchecked bool

	// RevokeWaiting waits for rows that others have locked.
	RevokeWaiting bool

	// WithoutOwnRow does not lock the call's own row before those of others.
	WithoutOwnRow bool
}

type key struct{}

// With returns a context whose calls are changed by hooks.
func With(ctx context.Context, hooks Hooks) context.Context {
	return context.WithValue(ctx, key{}, &hooks)
}

var none = &Hooks{}

// From returns the hooks of ctx, never nil.
func From(ctx context.Context) *Hooks {
	if hooks, ok := ctx.Value(key{}).(*Hooks); ok {
		return hooks
	}

	return none
}

// Given reports whether the hooks are those of a test.
func (h *Hooks) Given() bool { return h != none }

// Reach calls At, if there is one.
func (h *Hooks) Reach(point Point) {
	if h.At != nil {
		h.At(point)
	}
}
