// Hooks is an application that had users, chats and messages before it had limits. It adds
// Legion in a few lines: the plugin, an agent model of its own, one BeforeCreate, and one
// LegionRules. It brings its own PostgreSQL:
//
//	go run ./examples/hooks
//
// Everything about the application is in app.go, and what limits it in limits.go.
package main

import (
	"context"
	"fmt"
	"io"

	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
	"github.com/legion-gorm/legion/examples/internal/server"
)

// connections would be one if the hooks did not pass on their own tx: a hook that used
// the application's db would wait for itself.
const connections = 1

func main() { server.Main("hooks", connections, run) }

// run is the application: it starts, and its users do things.
func run(ctx context.Context, db *gorm.DB, out io.Writer) error {
	db = db.WithContext(ctx)

	if err := start(db); err != nil {
		return err
	}

	return tell(db, out)
}

// start is what the application did before, and the plugin.
func start(db *gorm.DB) error {
	plugin := legion.New(
		legion.WithModel(&ChatAgent{}),
		legion.WithDefaultPolicy(perTenant),
		legion.WithMigrate(),
		legion.WithObserver(nil), // denials are printed here, not logged
	)
	if err := db.Use(plugin); err != nil {
		return fmt.Errorf("use the plugin: %w", err)
	}

	if err := db.AutoMigrate(&User{}, &Chat{}, &Message{}, &Report{}); err != nil {
		return fmt.Errorf("migrate the application's tables: %w", err)
	}

	return nil
}
