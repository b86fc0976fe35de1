package database

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion/internal/fault"
)

// A Connect opens a connection that does not belong to the application's pool. Whoever
// calls it closes the connection.
type Connect func(ctx context.Context) (*pgx.Conn, error)

// ConnectOf returns how connections outside the pool of db are opened: as the settings
// say, or else as the pool's own driver opened one of the pool's.
//
// The latter takes one connection of the pool, to read the configuration that it was made
// with, and gives it back at once.
func ConnectOf(db *gorm.DB, settings Settings) (Connect, error) {
	if settings.Connect != nil {
		return settings.Connect, nil
	}

	config, err := configOf(db, settings.ConnectionTimeout)
	if err != nil {
		return nil, err
	}

	return func(ctx context.Context) (*pgx.Conn, error) { return pgx.ConnectConfig(ctx, config.Copy()) }, nil
}

func configOf(db *gorm.DB, timeout time.Duration) (config *pgx.ConnConfig, err error) {
	pool := sqlDB(db)
	if pool == nil {
		return nil, fmt.Errorf("%w: the pool is no *sql.DB, so that no connection beside it can be opened: "+
			"say how with legion.WithConnect", fault.ErrInvalidConfig)
	}

	connection, err := connectionWithin(db.Statement.Context, pool, timeout)
	if err != nil {
		return nil, err
	}

	defer func() { err = errors.Join(err, connection.Close()) }()

	err = connection.Raw(func(driverConnection any) error {
		wrapped, ok := driverConnection.(*stdlib.Conn)
		if !ok {
			return fmt.Errorf("%w: the pool's connections are %T and not pgx's, so that no connection beside the pool can be opened: "+
				"say how with legion.WithConnect", fault.ErrInvalidConfig, driverConnection)
		}

		config = wrapped.Conn().Config()
		// These are the pool's, and would be told of the new connection's.
		config.OnNotice, config.OnNotification = nil, nil

		return nil
	})

	return config, err
}
