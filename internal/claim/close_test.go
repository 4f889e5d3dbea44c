package claim

import "testing"

func (s *script) close() *script {
	s.t.Helper()
	return s.event("close", func() { s.c.Close(s.now) })
}

func (s *script) force() *script {
	s.t.Helper()
	return s.event("force", func() { s.c.Force(s.now) })
}

func TestCloseWhileAsking(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	s.close().failed("a", Closed).done()
	cmd = s.says(cmd, granted(ttl)).sends(Release, "g1", "")
	s.says(cmd, Answer{Status: Released}).idle()
}

func TestCloseWhileQueued(t *testing.T) {
	t.Parallel()
	s := run(t).waits("a").request("b").close().failed("a", Closed).failed("b", Closed)
	s.says(s.sends(Release, "g1", ""), Answer{Status: Withdrawn}).idle()
}

func TestCloseWhileHeldWaitsForTheUser(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a", linger).request("b").close().failed("b", Closed).done()
	s.next(renewal(s)).sends(Renew, "g1", "") // and keeps the lease alive meanwhile
	s = run(t).holds("a", linger).close().done()
	s.says(s.release("a").sends(Release, "g1", ""), Answer{Status: Released}).confirms("a", OK).idle()
}

func TestCloseWhileLingering(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a", linger).release("a").confirms("a", OK).close()
	s.says(s.sends(Release, "g1", ""), Answer{Status: Released}).idle()
}

func TestCloseWhileLost(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a").wait(ttl).loses("a", LostExpired)
	cmd := s.sends(Release, "g1", "")
	s.close().done().force().done()
	s.says(cmd, Answer{Status: NotYours}).done()
	s.release("a").confirms("a", Lost).idle()
}

func TestCloseForcedTellsTheUserFirst(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a").close().done().force().loses("a", LostClosed)
	s.says(s.sends(Release, "g1", ""), Answer{Status: Released}).done()
	s.release("a").confirms("a", Lost).idle()
}

func TestCloseRefusesWhatComes(t *testing.T) {
	t.Parallel()
	s := run(t).close().request("a").failed("a", Closed)
	s.request("b", try).failed("b", Closed).close().idle()
}

func TestCloseDoesNotWaitForWhatIsDenied(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a").close().done()
	s.fails(s.release("a").sends(Release, "g1", ""), Denied).confirms("a", Unconfirmed).idle()
}
