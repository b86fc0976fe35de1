package pgtest

import ("testing";"time";"os")

func TestMain(m *testing.M) { Main(m) }

func TestSmoke(t *testing.T) {
	s := time.Now()
	db := Open(t)
	t.Log(time.Since(s), DSN(db))
	var v string
	if err := db.Raw("select version()").Scan(&v).Error; err != nil { t.Fatal(err) }
	t.Log(v)
	for range 10 { s = time.Now(); Open(t); t.Log(time.Since(s)) }
	dsn := Database(t)
	for range 5 { s = time.Now(); OpenDSN(t, dsn); t.Log("connect", time.Since(s)) }
	_ = os.Args
}
