package drivertest

import (
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// cluster is a Cluster of two primaries, each with half of the slots.
type cluster struct {
	nodes [2]*redistest.Server
	ids   [2]string
	d     driver.Driver
	h     Harness
}

// RunCluster runs the part of the suite that is about a Cluster. h.New is given the address of one node.
func RunCluster(t *testing.T, h Harness) {
	t.Helper()
	shared := startCluster(t, h) // takes seconds; each test has slots of its own
	for _, tc := range []struct {
		name string
		run  func(t *testing.T, c *cluster)
	}{
		{"ClusterUsesAllNodes", testClusterAllNodes},
		{"ClusterFollowsMoved", testClusterMoved},
		{"ClusterFollowsAsk", testClusterAsk},
		{"ClusterSession", testClusterSession},
		{"ClusterSilentNodeHarmsNoOther", testClusterSilentNode},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := *shared
			c.d = h.New(t, c.nodes[0].Addr())
			tc.run(t, &c)
		})
	}
}

func startCluster(t *testing.T, h Harness) *cluster {
	t.Helper()
	c := &cluster{h: h}
	for i, slots := range [][2]string{{"0", "8191"}, {"8192", "16383"}} {
		n := redistest.Start(t, redistest.WithConfig("cluster-enabled", "yes"), redistest.WithConfig("cluster-node-timeout", "20000"))
		n.MustDo("CLUSTER", "ADDSLOTSRANGE", slots[0], slots[1])
		n.MustDo("CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1))
		c.nodes[i] = n
		c.ids[i], _ = n.MustDo("CLUSTER", "MYID").(string)
	}
	host, port, err := net.SplitHostPort(c.nodes[1].Addr())
	if err != nil {
		t.Fatal(err)
	}
	c.nodes[0].MustDo("CLUSTER", "MEET", host, port)
	for _, n := range c.nodes {
		redistest.WaitFor(t, "the cluster to be whole", func() bool {
			info, _ := n.MustDo("CLUSTER", "INFO").(string)
			return strings.Contains(info, "cluster_state:ok")
		})
	}
	return c
}

// key returns a key of the node, different for each tag. Its slot is the node's own at the start.
func (c *cluster) key(t *testing.T, node int, tag string) string {
	t.Helper()
	for i := range 100 {
		key := "{" + tag + strconv.Itoa(i) + "}k"
		if slot, ok := c.nodes[0].MustDo("CLUSTER", "KEYSLOT", key).(int64); ok && int(slot/8192) == node {
			return key
		}
	}
	t.Fatal("no key for the node")
	return ""
}

func (c *cluster) slot(key string) string {
	slot, _ := c.nodes[0].MustDo("CLUSTER", "KEYSLOT", key).(int64)
	return strconv.FormatInt(slot, 10)
}

func (c *cluster) wantRan(t *testing.T, node int, key, want string) {
	t.Helper()
	if got := c.nodes[node].MustDo("GET", key); got != want {
		t.Errorf("the script of %s ran %v times on node %d, want %s", key, got, node, want)
	}
}

func testClusterAllNodes(t *testing.T, c *cluster) {
	s := count("cluster")
	var cs []driver.Cmd
	for i := range 40 {
		cs = append(cs, cmd(s, c.key(t, i%2, "all"+strconv.Itoa(i)+"-")))
	}
	for round := range 3 {
		e := &env{h: c.h, d: c.d}
		var calls []<-chan outcome
		for _, one := range cs {
			calls = append(calls, e.goExec(t.Context(), one))
		}
		for _, call := range calls {
			got := within(t, "Exec", c.h.Bound, call)
			if got.err != nil {
				t.Fatal(got.err)
			}
			wantReply(t, "Exec", got.reply, []any{int64(2*round + 1)})
		}
		for i, r := range c.d.ExecMulti(t.Context(), cs) {
			if r.Err != nil {
				t.Fatalf("element %d: %v", i, r.Err)
			}
			wantReply(t, "ExecMulti", r.Reply, []any{int64(2*round + 2)})
		}
		for _, n := range c.nodes {
			n.MustDo("SCRIPT", "FLUSH")
		}
	}
	_, err := c.d.Exec(t.Context(), driver.Cmd{Script: s, Keys: []string{cs[0].Keys[0], cs[1].Keys[0]}})
	wantClass(t, "keys of two nodes", err, driver.ErrPermanent)
}

// offer makes the slot of key, which has no keys, one that is on its way from node 0 to node 1.
func (c *cluster) offer(key string) {
	c.nodes[1].MustDo("CLUSTER", "SETSLOT", c.slot(key), "IMPORTING", c.ids[0])
	c.nodes[0].MustDo("CLUSTER", "SETSLOT", c.slot(key), "MIGRATING", c.ids[1])
}

// move gives the slot of key to node 1.
func (c *cluster) move(key string) {
	c.offer(key)
	c.nodes[1].MustDo("CLUSTER", "SETSLOT", c.slot(key), "NODE", c.ids[1])
	c.nodes[0].MustDo("CLUSTER", "SETSLOT", c.slot(key), "NODE", c.ids[1])
}

func testClusterMoved(t *testing.T, c *cluster) {
	s := count("moved")
	mustExec(t, c.d, cmd(s, c.key(t, 0, "warm")))
	key := c.key(t, 0, "exec")
	c.move(key)
	mustExec(t, c.d, cmd(s, key))
	c.wantRan(t, 1, key, "1")

	key, stays := c.key(t, 0, "multi"), c.key(t, 0, "stays")
	c.move(key)
	for _, r := range c.d.ExecMulti(t.Context(), []driver.Cmd{cmd(s, key), cmd(s, stays), cmd(s, key)}) {
		if r.Err != nil {
			t.Fatalf("ExecMulti: %v", r.Err)
		}
	}
	c.wantRan(t, 1, key, "2")
	c.wantRan(t, 0, stays, "1")

	key = c.key(t, 0, "wait")
	c.move(key)
	if _, _, err := c.d.ExecWait(t.Context(), cmd(s, key), 0, 10*time.Millisecond); err != nil {
		t.Fatalf("ExecWait: %v", err)
	}
	c.wantRan(t, 1, key, "1")
}

func testClusterAsk(t *testing.T, c *cluster) {
	s := count("ask")
	mustExec(t, c.d, cmd(s, c.key(t, 0, "ask warm")))
	key := c.key(t, 0, "ask exec")
	c.offer(key)
	for i := range 3 { // the first finds no script on the other node
		wantReply(t, "Exec", mustExec(t, c.d, cmd(s, key)), []any{int64(i + 1)})
	}
	results := c.d.ExecMulti(t.Context(), []driver.Cmd{cmd(s, c.key(t, 0, "ask stays")), cmd(s, key), cmd(s, key)})
	for i, r := range results {
		if r.Err != nil {
			t.Fatalf("element %d: %v", i, r.Err)
		}
	}
	want := "5"
	_, _, err := c.d.ExecWait(t.Context(), cmd(s, key), 0, 10*time.Millisecond)
	if err == nil { // an adapter may follow ASK here, or not
		want = "6"
	} else {
		wantClass(t, "ExecWait", err, driver.ErrNotExecuted)
	}
	c.move(key)
	c.wantRan(t, 1, key, want)
}

func testClusterSilentNode(t *testing.T, c *cluster) {
	e := &env{h: c.h, d: c.d}
	s := count("silent node")
	here, there := c.key(t, 0, "here"), c.key(t, 1, "there")
	mustExec(t, c.d, cmd(s, here))
	mustExec(t, c.d, cmd(s, there))
	c.nodes[1].Pause()
	defer c.nodes[1].Resume()
	var stuck []<-chan outcome
	for range 10 {
		stuck = append(stuck, e.goExec(t.Context(), cmd(s, there)))
	}
	for range 20 {
		if got := within(t, "a call to the other node", prompt, e.goExec(t.Context(), cmd(s, here))); got.err != nil {
			t.Fatal(got.err)
		}
	}
	for _, call := range stuck {
		wantClass(t, "a call to the silent node", within(t, "it", c.h.Bound, call).err, driver.ErrUnknown, driver.ErrNotExecuted)
	}
	c.nodes[1].Resume()
	redistest.WaitFor(t, "the node to serve again", func() bool {
		_, err := c.d.Exec(t.Context(), cmd(s, there))
		return err == nil
	})
}

func testClusterSession(t *testing.T, c *cluster) {
	e := &env{h: c.h, d: c.d}
	s, r := open(t, e)
	subscribe(t, s, r, "a", "b")
	for node := range c.nodes {
		channel := string("ab"[node])
		script := driver.NewScript("return {redis.call('PUBLISH', ARGV[1], ARGV[2])}")
		mustExec(t, c.d, cmd(script, c.key(t, node, "p"), channel, "x"))
		r.wait(t, driver.Message, channel)
	}
	closeAndCheck(t, s, r)
}
