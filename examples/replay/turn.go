package main

import (
	"context"
	"fmt"
	"time"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/limiter"
	"github.com/legion-gorm/legion/models"
	"github.com/legion-gorm/legion/store"
)

// transactionAttempts bounds how often a transaction runs when it lost a deadlock or the
// connection. What Legion opens by itself it retries by itself; a transaction of the
// application's own is the application's to retry.
const transactionAttempts = 3

func transaction(ctx context.Context, db *gorm.DB, body func(tx *gorm.DB) error) error {
	for attempt := 1; ; attempt++ {
		err := db.WithContext(ctx).Transaction(body)
		if err == nil || attempt == transactionAttempts || !legion.Retryable(err) {
			return err
		}
	}
}

// begin admits a turn and logs its admission, in one transaction. A denial is the error of
// Enforce, and nothing is written. Latency is the time that Enforce took, with the wait
// for its locks.
func begin(ctx context.Context, db *gorm.DB, turn turn, window time.Duration) (latency time.Duration, err error) {
	rules := turn.rules(window)

	err = transaction(ctx, db, func(tx *gorm.DB) error {
		snapshot, err := currentSnapshot(tx)
		if err != nil {
			return err
		}

		before := time.Now()
		err = limiter.Enforce(tx, turn.agentID, rules...)
		latency = time.Since(before)

		if err != nil {
			return err
		}

		return logAdmission(ctx, tx, turn, rules, snapshot)
	})

	return latency, err
}

// end records what an admitted turn has used and gives its slot back, in one transaction
// with the log.
func end(ctx context.Context, db *gorm.DB, turn turn) error {
	return transaction(ctx, db, func(tx *gorm.DB) error {
		if err := logEnd(tx, turn); err != nil {
			return err
		}

		usage := models.Usage{
			ID:           fmt.Sprintf("turn-%d", turn.number), // so that a retry counts once
			TotalTokens:  turn.tokens(),
			InputTokens:  turn.contextTokens,
			OutputTokens: turn.generatedTokens,
		}
		if _, err := store.For[models.LegionAgent](tx).AppendUsage(ctx, turn.agentID, usage); err != nil {
			return fmt.Errorf("append the usage: %w", err)
		}

		return limiter.Release(tx, turn.agentID)
	})
}
