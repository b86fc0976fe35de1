// Package limiter decides whether an agent may start, in one transaction of the
// application's own PostgreSQL.
//
// A [Rule] is an [Identity], the group that is limited, and a [Policy], its limits.
// [Enforce] locks what must be locked, measures every rule, and either records the
// agent or denies with an [ExceededError] and changes nothing:
//
//	err := limiter.Enforce(db.WithContext(ctx), agentID, limiter.Rule{
//		Identity: limiter.Identity{"tenant": "acme"},
//		Policy:   limiter.Policy{Window: time.Minute, MaxAgents: limiter.Max(10)},
//	})
//	var exceeded *limiter.ExceededError
//	if errors.As(err, &exceeded) {
//		// exceeded.Rule, exceeded.Violations, exceeded.RetryAfter
//	}
//
// A verdict is exact under any concurrency: locks.go holds the argument.
//
// Every function takes the *gorm.DB to work on. If that is in a transaction, the
// call joins it, and a rollback takes the admission back. If not, the call opens a
// transaction of its own. The context is that of the db: db.WithContext(ctx).
package limiter
