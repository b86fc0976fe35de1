// Package reference is what the limiter and the store should do, as a state machine
// in memory. Tests run the real ones against it.
//
// It is written from the contract, in the plainest way that is right, and shares
// nothing with the code that it checks: no locks, no SQL, no early end of a count.
// Where it and the limiter disagree, one of them has a bug.
//
// A [State] is a value. [State.Step] leaves it as it is and returns the next one, so a
// checker may keep as many states as it likes:
//
//	model := porcupine.Model{
//		Init: func() any { return reference.New(reference.Settings{Lease: lease}) },
//		Step: func(state, operation, outcome any) (bool, any) {
//			next, result := state.(reference.State).Step(operation.(reference.Operation))
//			return result.Outcome == outcome, next
//		},
//		Equal: func(a, b any) bool { return a.(reference.State).Equal(b.(reference.State)) },
//		Hash:  func(state any) uint64 { return state.(reference.State).Hash() },
//	}
//
// # The verdict
//
//   - A rule's group is every row whose identity contains the rule's, deleted ones
//     too, less the caller's own row, and then the caller, whatever its identity was
//     before: a verdict is about the group with the caller in it.
//   - Agents: rows that started within the window. A caller without a start starts now.
//   - Running agents: rows that hold a slot, and the caller.
//   - Tokens and evals: the sums of the entries within the window. Tokens that others
//     hold reserved are used.
//   - A moment is within the window if it is later than now - Window.
//   - Agents and running agents may reach their limit with the caller counted. Tokens
//     and evals must be under it. A limit of 0 denies in any case.
//   - The first rule with a violated limit denies, with all its violated limits, and
//     then nothing changes.
//
// # Slots
//
// A row that is running and has a lease holds a slot. An unowned slot, without a run,
// ends with its lease. An owned one counts until it is given back or revoked, also
// after its lease. If a violated limit, of any rule, counts a slot or a reservation
// whose lease is over, then every such slot in the groups of rules that count slots or
// reservations is revoked, and the call is measured again. A denial undoes that.
//
// # Turns
//
//   - Begin of an agent that is live under another run is refused before any denial, and
//     so is Resume of a run that is not interrupted, or whose agent is deleted.
//   - Begin of the run that is live already is a retry: no verdict, and the lease is
//     whole again. A run that has ended does not begin again.
//   - Otherwise Begin is decided like an enforce, with the tokens that it reserves: what
//     is used and what is requested may together reach the limit. Resume checks running
//     agents only, and tokens if it reserves some: the rest is counted already.
//   - Then the run has the row, with a lease and its reservation. Without rules it is
//     not limited, and the agent stays in its groups.
//   - Renew needs the run and a lease that is not over. End and Checkpoint need the run
//     and a lease, over or not. Record needs nothing, and lowers what the run reserves.
//   - End leaves the run on the idle row, so that it can be called again. A Save as idle
//     takes a run that it gives up off the row.
//
// # What it leaves out
//
// Time passes only by [Advance]. Folding changes no sum here: how it rounds times, the
// registry of identities, malformed rows and the size limits of identities are for other
// tests.
package reference
