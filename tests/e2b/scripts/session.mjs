// The session of session.py with the client for JavaScript, which watches by a stream and sends all bodies in chunks.
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'
import { CommandExitError, NotFoundError, Sandbox } from 'e2b'

export const OPTIONS = { timeoutMs: 120_000, metadata: { 'a b': 'c&d' }, envs: { COLOR: 'blue' } }

// Use a new sandbox that has COLOR in its environment, and end it.
export async function session(sandbox) {
  const seen = { client: createRequire(import.meta.url)('e2b/package.json').version }
  let handle
  try {
    await commands(sandbox, seen)
    await files(sandbox, seen)
    await life(sandbox, seen)
    handle = await sandbox.commands.run('sleep 60', { background: true })
  } finally {
    seen.end = [await sandbox.kill(), await sandbox.kill(), await sandbox.isRunning()]
  }
  seen.cut = await handle.wait().catch((error) => [error.name, error.message])
  return seen
}

async function commands({ commands, pty }, seen) {
  seen.output = (await commands.run('echo $COLOR; id -un; pwd')).stdout
  seen.exit = await commands.run('echo to stderr >&2; exit 3').catch(told(CommandExitError, 'exitCode', 'stderr'))
  const sleeping = await commands.run('sleep 60', { background: true })
  seen.listed = (await commands.list()).some((one) => one.pid === sleeping.pid)
  seen.killed = [await sleeping.kill(), await sleeping.kill()]
  seen.gone = (await commands.run(`kill -0 ${sleeping.pid} 2>/dev/null || echo gone`)).stdout
  const reading = await commands.run('read line; echo got $line', { background: true, stdin: true })
  await commands.sendStdin(reading.pid, 'typed\n')
  seen.stdin = (await reading.wait()).stdout
  let screen = ''
  const terminal = await pty.create({ cols: 90, rows: 30, onData: (data) => (screen += Buffer.from(data)) })
  await pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit\n'))
  await terminal.wait()
  seen.terminal = screen.includes('30 90')
}

async function files(sandbox, seen) {
  const { files } = sandbox
  const events = []
  let done
  const written = new Promise((resolve) => (done = resolve))
  const watcher = await files.watchDir('.', (event) => {
    events.push([event.type, event.name])
    if (events.length === 3) done()
  })
  await files.write('new.txt', 'content')
  await written
  await watcher.stop()
  seen.events = events
  seen.read = await files.read('new.txt')
  seen.entries = (await files.list('/home/user')).filter(({ name }) => name === 'new.txt').map(({ path }) => path)
  seen.moved = (await files.rename('new.txt', 'sub/dir/moved.txt')).path
  seen.made = [await files.makeDir('made'), await files.makeDir('made'), await files.exists('made')]
  await files.remove('made')
  seen.missing = await files.read('made/nothing').catch((error) => error instanceof NotFoundError)
  seen.signed = await (await fetch(await sandbox.downloadUrl('sub/dir/moved.txt'))).text()
  const late = await fetch(await sandbox.downloadUrl('sub/dir/moved.txt', { useSignatureExpiration: -10 }))
  seen.expired = [late.status, await late.json()]
}

async function life(sandbox, seen) {
  const found = await Sandbox.list({ query: { metadata: { 'a b': 'c&d' } } }).nextItems()
  seen.found = found.filter(({ sandboxId }) => sandboxId === sandbox.sandboxId).length
  await sandbox.commands.run('sleep 600', { background: true })
  await sandbox.pause()
  seen.paused = await sandbox.isRunning()
  await sandbox.connect()
  seen.resumed = (await sandbox.commands.run('pgrep -c sleep')).stdout
}

// Tell fields of an error of a kind; what is of another kind goes on.
function told(kind, ...fields) {
  return (error) => {
    if (!(error instanceof kind)) throw error
    return fields.map((field) => error[field])
  }
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  console.log(JSON.stringify(await session(await Sandbox.create(OPTIONS))))
}
