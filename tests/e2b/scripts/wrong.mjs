// Calls that cannot succeed, and what each ends with, for the client for JavaScript.
import { Sandbox } from 'e2b'

const UNKNOWN = 'sbx' + 'a'.repeat(16)
const [paused, killed, live] = await Promise.all([1, 2, 3].map(() => Sandbox.create({ timeoutMs: 120_000 })))
await paused.pause()
await killed.kill()
const calls = {
  'unknown connect': () => Sandbox.connect(UNKNOWN),
  'unknown kill': () => Sandbox.kill(UNKNOWN),
  'unknown info': () => Sandbox.getInfo(UNKNOWN),
  'unknown timeout': () => Sandbox.setTimeout(UNKNOWN, 10_000),
  'unknown key': () => Sandbox.list({ apiKey: 'e2b_' + '0'.repeat(64) }).nextItems(),
  'unknown template': () => Sandbox.create('nothing-of-that-name'),
  'unknown user': () => live.commands.run('true', { user: 'nobody-of-that-name' }),
  "unknown user's file": () => live.files.read('x', { user: 'nobody-of-that-name' }),
  'unknown cwd': () => live.commands.run('true', { cwd: '/nowhere' }),
  'unknown file': () => live.files.read('/nowhere'),
  'unknown directory': () => live.files.list('/nowhere'),
  "a directory's bytes": () => live.files.read('/home/user'),
  'too long': () => live.commands.run('sleep 30', { timeoutMs: 300 }),
  'a name denied': () => Sandbox.create({ network: { denyOut: ['a.test'] } }),
  'paused running': () => paused.isRunning(),
  'paused run': () => paused.commands.run('true'),
  'paused file': () => paused.files.read('/etc/hostname'),
  'paused list': () => paused.files.list('/'),
  'paused watch': () => paused.files.watchDir('/', () => {}),
  'killed running': () => killed.isRunning(),
  'killed kill': () => killed.kill(),
  'killed connect': () => Sandbox.connect(killed.sandboxId),
  'killed run': () => killed.commands.run('true'),
  'killed file': () => killed.files.read('/etc/hostname'),
  'killed write': () => killed.files.write('x', 'x'),
}
const seen = {}
try {
  for (const [name, call] of Object.entries(calls)) {
    seen[name] = await call().then((told) => `returned ${told}`, (error) => error.name)
  }
} finally {
  await paused.kill()
  await live.kill()
}
console.log(JSON.stringify(seen))
