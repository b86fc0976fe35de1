package legion_test

import (
	"fmt"
	"strings"

	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/legion-gorm/legion"
)

// The SQL for a migration file of goose or Atlas. Nothing is connected to.
func ExampleDDL() {
	db, err := gorm.Open(postgres.Open("host=localhost"), &gorm.Config{DisableAutomaticPing: true})
	if err != nil {
		panic(err)
	}

	if pool, err := db.DB(); err == nil {
		defer pool.Close()
	}

	statements, err := legion.DDL(db)
	if err != nil {
		panic(err)
	}

	fmt.Println(strings.Join(statements, "\n"))

	// Output:
	// CREATE TABLE "legion_agents" (
	//   "agent_id" text,
	//   "agent_type" text,
	//   "parent_agent_id" text,
	//   "status" text NOT NULL DEFAULT 'idle',
	//   "metadata" JSONB,
	//   "usage" JSONB NOT NULL DEFAULT jsonb_build_array(),
	//   "conversation_state" bytea,
	//   "reserved_tokens" bigint NOT NULL DEFAULT 0,
	//   "run_id" text,
	//   "lease_expires_at" timestamptz,
	//   "started_at" timestamptz,
	//   "created_at" timestamptz NOT NULL DEFAULT now(),
	//   "updated_at" timestamptz NOT NULL DEFAULT now(),
	//   "deleted_at" timestamptz,
	//   PRIMARY KEY ("agent_id"),
	//   CONSTRAINT "chk_legion_agents_status" CHECK (status IN ('idle', 'running'))
	// );
	// CREATE INDEX "idx_legion_agents_metadata" ON "legion_agents" USING gin (metadata jsonb_path_ops) WITH (fastupdate = off);
	// CREATE INDEX "idx_legion_agents_running" ON "legion_agents" USING gin (metadata jsonb_path_ops) WITH (fastupdate = off) WHERE status = 'running';
	// CREATE INDEX "idx_legion_agents_started_at" ON "legion_agents" USING btree ("started_at");
	// CREATE INDEX "idx_legion_agents_updated_at" ON "legion_agents" USING btree ("updated_at");
	// ALTER TABLE "legion_agents" SET (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02);
	// CREATE TABLE "legion_agents_identities" (
	//   "identity" JSONB,
	//   "created_at" timestamptz NOT NULL DEFAULT now(),
	//   PRIMARY KEY ("identity")
	// );
}
