package main

import (
	"context"
	"encoding/json"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion/bench/internal/measure"
)

// takeToken takes a token from the bucket of the scenario's first identity, a row, in a
// plain transaction. It knows one key, a rate and a burst: no overlapping groups, nobody
// who runs, and no agent that is counted once.
func (s scenario) takeToken(session *session) measure.Call {
	burst, rate := int64(plenty), 1000.0
	if s.denied {
		burst, rate = 1, 0 // prepareFullGroup has emptied the bucket
	}

	const refilled = "least(excluded.burst, bucket.tokens + bucket.rate * extract(epoch FROM excluded.at - bucket.at))"

	return func(ctx context.Context, batch, number int) error {
		key, err := json.Marshal(s.rules(session, batch, number)[0].Identity)
		if err != nil {
			return err
		}

		err = session.db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			taken := tx.Exec(`
INSERT INTO bench_buckets AS bucket (key, burst, rate, tokens, at) VALUES (?, ?, ?, ?, clock_timestamp())
ON CONFLICT (key) DO UPDATE SET burst = excluded.burst, rate = excluded.rate, at = excluded.at, tokens = `+refilled+` - 1
WHERE `+refilled+` >= 1`, string(key), burst, rate, burst-1)
			if taken.Error == nil && taken.RowsAffected == 0 {
				return errDenied
			}

			return taken.Error
		})
		return s.expect(err, errDenied)
	}
}
