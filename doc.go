// Package legion rate-limits AI agents with the application's own PostgreSQL,
// through GORM.
//
// An agent is one conversation, job or run: a row in one table. Before it works, the
// application names the groups that it belongs to, such as an IP address, a tenant or
// an email, and the limits of each. One transaction decides: every rule allows and the
// agent is recorded, or one denies and nothing changes.
//
// # Tables
//
// [Migrate] makes the two tables, and any number of processes may call it at start-up:
//
//	db, err := gorm.Open(postgres.Open(dsn), &gorm.Config{})
//	...
//	err = legion.Migrate(db)
//
// An application that already runs AutoMigrate can add [Models] to it, and one that
// keeps its schema in SQL files takes them from [DDL].
//
// # Admission
//
// Package limiter decides, inside the caller's transaction or in one of its own:
//
//	err = limiter.Enforce(db.WithContext(ctx), agentID, limiter.Rule{
//		Identity: limiter.Identity{"tenant": "acme"},
//		Policy:   limiter.Policy{Window: time.Minute, MaxAgents: limiter.Max(10)},
//	})
//
// A denial is an error that names the rule and every limit that it exceeds. Whatever
// goes wrong is an error too: a call never allows because the database did not answer.
//
// # Turns
//
// [Plugin.Run] is a whole turn of an agent: it enforces the rules, holds the agent's slot
// by a lease as long as the work goes on, records what it uses, and gives the slot back
// however it ends. A process that dies loses its slots one lease later, and another one
// resumes its work with [Plugin.Recover]:
//
//	err = plugin.Run(ctx, agentID, legion.TurnOptions{Rules: rules, Reserve: 4000},
//		func(ctx context.Context, turn *legion.Turn) error {
//			return turn.Record(ctx, models.Usage{TotalTokens: 1234})
//		})
//
// # Packages
//
//   - limiter: identities, policies, rules and the verdict
//   - store: reading and writing the agents' rows
//   - models: the tables as GORM models
package legion
